// Checksums of the pages of a file; the thread that read a page compares it while it is in the cache.
#pragma once
#include <cstdint>

// CRC-32 of each page of a file from its beginning on; an empty table compares nothing.
struct PageSums {
    const uint32_t* sums = nullptr;
    int64_t count = 0;
};

// Returns the offset of the first page in [offset, offset + bytes) whose checksum is wrong, or -1. Pages that were read
// only in part, and those beyond the table, are not compared.
int64_t first_damaged(const PageSums& pages, const char* memory, int64_t offset, int64_t bytes);
