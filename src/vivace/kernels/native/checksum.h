// A checksum for every page of a file: what was read is compared by the thread that read it, while it is in its cache.
#pragma once
#include <cstdint>

// CRC-32 of each page of a file, from its beginning on; nothing is compared where there is no table.
struct PageSums {
    const uint32_t* sums = nullptr;
    int64_t count = 0;
};

// Where the first page of [offset, offset + bytes) begins that is not as it was written, or -1. Pages that were read in
// part, and those beyond the table, are not compared.
int64_t first_damaged(const PageSums& pages, const char* memory, int64_t offset, int64_t bytes);
