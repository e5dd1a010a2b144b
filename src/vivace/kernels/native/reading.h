// A read of a file that goes on until everything is read.
#pragma once
#include <cerrno>
#include <cstdint>
#include <unistd.h>

#include "abi.h"

// Reads up to `bytes` bytes, of which at least `least` must be there. Returns 0, an error number, or ENDED.
inline int64_t read_all(int file, char* into, int64_t bytes, int64_t offset, int64_t least) {
    for (int64_t done = 0; done < least;) {
        const ssize_t got = pread(file, into + done, bytes - done, offset + done);
        if (got < 0 && errno == EINTR) continue;
        // The rest of a direct read is no whole page where the file has ended.
        if (got < 0) return errno == EINVAL && done ? ENDED : errno;
        if (got == 0) return ENDED;
        done += got;
    }
    return 0;
}
