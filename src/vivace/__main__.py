"""``python -m vivace`` runs the ``vivace`` command."""

from vivace.cli import main

main()
