// One read of a file, to its end.
#pragma once
#include <cerrno>
#include <cstdint>
#include <unistd.h>

#include "abi.h"

// As much as is asked for, or an error number, or ENDED. Of what is read `least` bytes must be there.
inline int64_t read_all(int file, char* into, int64_t bytes, int64_t offset, int64_t least) {
    for (int64_t done = 0; done < least;) {
        const ssize_t got = pread(file, into + done, bytes - done, offset + done);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return errno == EINVAL && done ? ENDED : errno;  // a direct read that is no whole pages any more
        if (got == 0) return ENDED;
        done += got;
    }
    return 0;
}
