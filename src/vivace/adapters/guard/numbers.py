"""Check digits, by which a card or account number is told from any other number of its length."""

from __future__ import annotations

_IBAN_LENGTHS = {
    **{"NO": 15, "BE": 16, "DK": 18, "FI": 18, "FO": 18, "GL": 18, "NL": 18, "MK": 19, "SI": 19, "AT": 20, "BA": 20},
    **{"EE": 20, "KZ": 20, "LT": 20, "LU": 20, "XK": 20, "CH": 21, "HR": 21, "LI": 21, "LV": 21, "BG": 22, "BH": 22},
    **{"CR": 22, "DE": 22, "GB": 22, "GE": 22, "IE": 22, "ME": 22, "RS": 22, "VA": 22, "AE": 23, "GI": 23, "IL": 23},
    **{"IQ": 23, "TL": 23, "AD": 24, "CZ": 24, "ES": 24, "MD": 24, "PK": 24, "RO": 24, "SA": 24, "SE": 24, "SK": 24},
    **{"TN": 24, "VG": 24, "PT": 25, "ST": 25, "IS": 26, "TR": 26, "FR": 27, "GR": 27, "IT": 27, "MC": 27, "MR": 27},
    **{"SM": 27, "AL": 28, "AZ": 28, "BY": 28, "CY": 28, "DO": 28, "GT": 28, "HU": 28, "LB": 28, "PL": 28, "UA": 29},
    **{"BR": 29, "PS": 29, "QA": 29, "JO": 30, "KW": 30, "MU": 30, "MT": 31, "SC": 31, "LC": 32},
}
"""Characters of an IBAN by country (SWIFT's registry). Other countries are taken at any length."""

_SHORTEST_CARD, _LONGEST_CARD = 13, 19
"""Digits of a card's number."""


def is_card(text: str) -> bool:
    """Return whether digits with spaces or hyphens between them hold the number of a card.

    That is a group of digits, or several side by side, of 13 to 19 digits in all, which begins as cards of the large
    networks do (2 to 6) and passes Luhn's check (ISO/IEC 7812-1). What follows it, such as a date, does not hide it.
    """
    groups = text.replace("-", " ").split()
    for first in range(len(groups)):
        number = ""
        for group in groups[first : first + _LONGEST_CARD]:
            number += group
            if len(number) > _LONGEST_CARD:
                break
            if len(number) >= _SHORTEST_CARD and _is_number(number):
                return True
    return False


def _is_number(number: str) -> bool:
    digits = [int(character) for character in number]
    doubled = [2 * digit - 9 * (digit > 4) for digit in digits[-2::-2]]
    return number[0] in "23456" and len(set(number)) > 1 and (sum(digits[-1::-2]) + sum(doubled)) % 10 == 0


def is_iban(text: str) -> bool:
    """Return whether an account number, with spaces or hyphens, has the length of its country and passes the check of
    ISO 13616 (mod 97 of ISO 7064).

    The number may be followed by words: ``text`` counts if it begins with one.
    """
    plain = "".join(character for character in text if character.isalnum()).upper()
    length = _IBAN_LENGTHS.get(plain[:2])
    return _passes(plain) if length is None else len(plain) >= length and _passes(plain[:length])


def _passes(plain: str) -> bool:
    """Return whether the letters and digits of an account number leave the remainder 1."""
    if not plain.isascii():
        return False
    return int("".join(str(int(character, 36)) for character in plain[4:] + plain[:4])) % 97 == 1
