// CRC-32 of pages as zlib computes it (reflected, polynomial 0x04C11DB7), by carry-less multiplication where the
// processor has it (Gopal et al. 2009, Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction), else
// by a table.
//
// A message is a polynomial over GF(2) and its CRC is the remainder modulo P. 128 bits that come d bits before others
// can be added to those after a multiplication by x^d mod P, so a page is folded into its last 16 bytes.
#include "checksum.h"

#include <array>
#include <cstring>

#include "abi.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

constexpr int64_t PAGE = 4096;
constexpr uint32_t P = 0xEDB88320;  // bit 31 is x^0; x^32 is implicit

constexpr uint32_t times_x(uint32_t value) { return (value >> 1) ^ (value & 1 ? P : 0); }

constexpr std::array<uint32_t, 256> TABLE = [] {
    std::array<uint32_t, 256> table{};
    for (uint32_t byte = 0; byte < 256; ++byte) {
        uint32_t value = byte;
        for (int bit = 0; bit < 8; ++bit) value = times_x(value);
        table[byte] = value;
    }
    return table;
}();

// Returns the CRC register after `bytes` more bytes.
uint32_t by_table(const unsigned char* memory, int64_t bytes, uint32_t value) {
    for (int64_t i = 0; i < bytes; ++i) value = (value >> 8) ^ TABLE[(value ^ memory[i]) & 255];
    return value;
}

uint32_t page_by_table(const char* page) {
    return ~by_table(reinterpret_cast<const unsigned char*>(page), PAGE, ~0u);
}

#if defined(__x86_64__)
#define FOLDS __attribute__((target("pclmul,sse4.1")))

// x^n mod P, shifted by one bit, since a product of reflected numbers is one bit too low.
constexpr int64_t power(int n) {
    uint32_t value = 1u << 31;
    for (int i = 0; i < n; ++i) value = times_x(value);
    return static_cast<int64_t>(value) << 1;
}

// Adds 128 bits to those that come `Bits` later. The low half comes 64 bits before the high one, and a factor of 32
// bits is in the lower places of its half, which are the 32 higher powers.
template <int Bits>
FOLDS inline __m128i folded(__m128i value, __m128i onto) {
    const __m128i factors = _mm_set_epi64x(power(Bits - 32), power(Bits + 32));
    const __m128i low = _mm_clmulepi64_si128(value, factors, 0x00), high = _mm_clmulepi64_si128(value, factors, 0x11);
    return _mm_xor_si128(_mm_xor_si128(low, high), onto);
}

FOLDS uint32_t page_by_folding(const char* page) {
    const __m128i* next = reinterpret_cast<const __m128i*>(page);
    __m128i a = _mm_xor_si128(_mm_loadu_si128(next), _mm_cvtsi32_si128(-1)), b = _mm_loadu_si128(next + 1);
    __m128i c = _mm_loadu_si128(next + 2), d = _mm_loadu_si128(next + 3);
    for (next += 4; next < reinterpret_cast<const __m128i*>(page + PAGE); next += 4) {
        a = folded<512>(a, _mm_loadu_si128(next)), b = folded<512>(b, _mm_loadu_si128(next + 1));
        c = folded<512>(c, _mm_loadu_si128(next + 2)), d = folded<512>(d, _mm_loadu_si128(next + 3));
    }
    alignas(16) unsigned char last[16];
    _mm_store_si128(reinterpret_cast<__m128i*>(last), folded<128>(folded<128>(folded<128>(a, b), c), d));
    return ~by_table(last, sizeof last, 0);
}

uint32_t (*const page_sum)(const char*) =
    __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1") ? page_by_folding : page_by_table;
#else
constexpr auto page_sum = page_by_table;
#endif

}  // namespace

int64_t first_damaged(const PageSums& pages, const char* memory, int64_t offset, int64_t bytes) {
    int64_t page = (offset + PAGE - 1) / PAGE;
    for (; (page + 1) * PAGE <= offset + bytes && page < pages.count; ++page) {
        if (page_sum(memory + (page * PAGE - offset)) != pages.sums[page]) return page * PAGE;
    }
    return -1;
}

// The same for Python.
EXPORT int64_t vivace_damaged(const void* sums, int64_t count, const void* memory, int64_t offset, int64_t bytes) {
    const PageSums pages{static_cast<const uint32_t*>(sums), count};
    return first_damaged(pages, static_cast<const char*>(memory), offset, bytes);
}

// Computes the CRC-32 of `count` pages, by the table if `by_table` is not 0, for tests of both ways.
EXPORT void vivace_page_sums(const void* memory, int64_t count, uint32_t* out, int64_t by_table) {
    const char* pages = static_cast<const char*>(memory);
    for (int64_t i = 0; i < count; ++i) out[i] = (by_table ? page_by_table : page_sum)(pages + i * PAGE);
}
