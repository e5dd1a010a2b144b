// Reads of one file by threads of this library, scattered or long, the most urgent first. Python is not called between
// two reads, so that the thread that computes does not wait for those that read.
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "abi.h"
#include "checksum.h"
#include "reading.h"

namespace {

using Clock = std::chrono::steady_clock;
using Urgency = std::tuple<int64_t, int64_t, int64_t>;  // when it is due, its rank, and the order of submission

constexpr int64_t PAGE = 4096;

int64_t up_to_page(int64_t bytes) { return (bytes + PAGE - 1) / PAGE * PAGE; }

// A buffer that is aligned to pages and grows.
class Pages {
public:
    ~Pages() { std::free(memory_); }

    char* of(int64_t bytes) {
        if (bytes > size_) {
            std::free(memory_);
            size_ = up_to_page(bytes);
            memory_ = static_cast<char*>(std::aligned_alloc(PAGE, size_));
        }
        return memory_;
    }

private:
    char* memory_ = nullptr;
    int64_t size_ = 0;
};

// Extents of the file that were submitted together. Threads read chunks of them in order.
struct Batch {
    Urgency urgency;
    char* memory;
    std::vector<Extent> extents;
    size_t next = 0;          // the first extent of which a part is still to be read
    int64_t taken = 0;        // bytes of this extent that threads have begun to read
    int64_t under_way = 0;    // reads that have begun and not ended
    size_t failed_place = 0;  // extent of the first read that failed, in the order of the extents
    int64_t failed = 0, failed_bytes = 0, error = 0;

    bool is_over() const { return next == extents.size() && under_way == 0; }

    bool is_one_chunk(int64_t chunk_bytes) const { return extents.size() == 1 && extents[0].bytes <= chunk_bytes; }

    // Records the error of a read. Chunks are begun in order, so all chunks before one that failed have ended or are
    // under way: whichever fails first, the error that is kept is that of the first chunk in the order of the extents.
    void fail(size_t place, int64_t offset, int64_t bytes, int64_t found) {
        if (error && std::pair(failed_place, failed) <= std::pair(place, offset)) return;
        failed_place = place, failed = offset, failed_bytes = bytes, error = found;
    }
};

class Reader {
public:
    Reader(int file, int64_t threads, int64_t chunk_bytes, bool is_direct, PageSums pages)
        : file_(file), chunk_bytes_(chunk_bytes), is_direct_(is_direct), pages_(pages) {
        for (int64_t i = 0; i < threads; ++i) threads_.emplace_back([this] { work(); });
    }

    // Finishes the reads that have begun and drops the others.
    ~Reader() {
        {
            const std::lock_guard<std::mutex> held(lock_);
            is_closed_ = true;
        }
        asked_.notify_all();
        for (std::thread& thread : threads_) thread.join();
    }

    int64_t submit(char* memory, const Extent* extents, int64_t count, int64_t due, int64_t rank) {
        bool needs_one = false;
        int64_t number;
        {
            const std::lock_guard<std::mutex> held(lock_);
            number = count_++;
            Batch& batch = batches_[number];
            batch.urgency = {due, rank, number};
            batch.memory = memory;
            batch.extents.assign(extents, extents + count);
            if (count) {
                waiting_[batch.urgency] = &batch;
            } else {
                over_.push_back(number);
            }
            needs_one = batch.is_one_chunk(chunk_bytes_);
        }
        needs_one ? asked_.notify_one() : asked_.notify_all();
        return number;
    }

    // Moves a batch that is not begun completely to another place in the queue.
    void reschedule(int64_t number, int64_t due) {
        const std::lock_guard<std::mutex> held(lock_);
        const auto found = batches_.find(number);
        if (found == batches_.end() || waiting_.erase(found->second.urgency) == 0) return;
        std::get<0>(found->second.urgency) = due;
        waiting_[found->second.urgency] = &found->second;
    }

    // Waits for the end of a batch, writes how it ended and removes it.
    void wait(int64_t number, Ended* out) {
        std::unique_lock<std::mutex> held(lock_);
        const auto found = batches_.find(number);
        if (found == batches_.end()) return;
        const Batch& batch = found->second;  // a reference stays valid when the map changes, an iterator does not
        ended_.wait(held, [&] { return batch.is_over(); });
        over_.erase(std::find(over_.begin(), over_.end(), number));
        forget(number, out);
    }

    // Writes how batches ended that were not waited for, in the order in which they ended, and removes them.
    int64_t completed(Ended* out, int64_t room, bool waits) {
        std::unique_lock<std::mutex> held(lock_);
        if (waits) ended_.wait(held, [this] { return !over_.empty() || batches_.empty(); });
        const int64_t count = std::min<int64_t>(room, over_.size());
        for (int64_t i = 0; i < count; ++i) forget(over_[i], out + i);
        over_.erase(over_.begin(), over_.begin() + count);
        return count;
    }

    void counts(int64_t* out) {
        const std::lock_guard<std::mutex> held(lock_);
        const auto busy = busy_ + (running_ ? Clock::now() - since_ : Clock::duration{});
        out[0] = num_reads_, out[1] = num_bytes_;
        out[2] = std::chrono::duration_cast<std::chrono::nanoseconds>(busy).count();
    }

private:
    void work() {
        Pages pages;
        std::unique_lock<std::mutex> held(lock_);
        for (;;) {
            asked_.wait(held, [this] { return is_closed_ || !waiting_.empty(); });
            if (is_closed_) return;
            Batch& batch = *waiting_.begin()->second;  // valid without the lock: a batch is removed only when it has ended
            const size_t place = batch.next;
            const Extent& whole = batch.extents[place];
            const int64_t first = batch.taken, bytes = std::min(chunk_bytes_, whole.bytes - first);
            batch.taken += bytes, ++batch.under_way;
            if (batch.taken == whole.bytes) batch.taken = 0, ++batch.next;
            if (batch.next == batch.extents.size()) waiting_.erase(batch.urgency);
            if (running_++ == 0) since_ = Clock::now();
            ++num_reads_, num_bytes_ += bytes;
            char* into = batch.memory + whole.place + first;
            int64_t offset = whole.offset + first;
            held.unlock();
            int64_t error = read(into, bytes, offset, pages);
            const int64_t damaged = error ? -1 : first_damaged(pages_, into, offset, bytes);
            if (damaged >= 0) error = DAMAGED, offset = damaged;
            held.lock();
            if (--running_ == 0) busy_ += Clock::now() - since_;
            --batch.under_way;
            if (error) {
                batch.fail(place, offset, bytes, error);
                waiting_.erase(batch.urgency), batch.next = batch.extents.size();  // the rest need not be read
            }
            if (batch.is_over()) {
                over_.push_back(std::get<2>(batch.urgency));
                ended_.notify_all();
            }
        }
    }

    // A direct read needs whole pages and memory that is aligned to pages; others go through a buffer of the thread.
    int64_t read(char* into, int64_t bytes, int64_t offset, Pages& pages) {
        const bool is_aligned = !(offset % PAGE || bytes % PAGE || reinterpret_cast<uintptr_t>(into) % PAGE);
        if (!is_direct_ || is_aligned) return read_all(file_, into, bytes, offset, bytes);
        const int64_t first = offset / PAGE * PAGE, before = offset - first;
        const int64_t size = up_to_page(before + bytes);
        char* found = pages.of(size);
        const int64_t error = read_all(file_, found, size, first, before + bytes);
        if (!error) std::memcpy(into, found + before, bytes);
        return error;
    }

    void forget(int64_t number, Ended* out) {
        const Batch& batch = batches_.at(number);
        *out = {number, batch.error, batch.failed, batch.failed_bytes};
        batches_.erase(number);
    }

    const int file_;
    const int64_t chunk_bytes_;
    const bool is_direct_;
    const PageSums pages_;
    std::mutex lock_;
    std::condition_variable asked_, ended_;
    std::unordered_map<int64_t, Batch> batches_;
    std::map<Urgency, Batch*> waiting_;
    std::vector<int64_t> over_;  // numbers of batches that have ended, in the order of their ends
    std::vector<std::thread> threads_;
    int64_t count_ = 0, running_ = 0, num_reads_ = 0, num_bytes_ = 0;
    Clock::time_point since_{};
    Clock::duration busy_{};
    bool is_closed_ = false;
};

}  // namespace

// Opens a reader of a file with the checksums of its pages, or none; both must exist until the reader is closed.
EXPORT void* vivace_reader_open(
    int64_t file, int64_t threads, int64_t chunk_bytes, int64_t is_direct, const void* sums, int64_t num_pages) {
    const PageSums pages{static_cast<const uint32_t*>(sums), num_pages};
    return new Reader(static_cast<int>(file), threads, chunk_bytes, is_direct != 0, pages);
}

EXPORT void vivace_reader_close(void* reader) { delete static_cast<Reader*>(reader); }

// Submits a batch and returns its number. The most urgent batch is due earliest, then has the lowest rank, then is
// oldest.
EXPORT int64_t vivace_reader_submit(
    void* reader, void* memory, const Extent* extents, int64_t count, int64_t due, int64_t rank) {
    return static_cast<Reader*>(reader)->submit(static_cast<char*>(memory), extents, count, due, rank);
}

EXPORT void vivace_reader_reschedule(void* reader, int64_t number, int64_t due) {
    static_cast<Reader*>(reader)->reschedule(number, due);
}

EXPORT void vivace_reader_wait(void* reader, int64_t number, Ended* out) {
    static_cast<Reader*>(reader)->wait(number, out);
}

// Writes the ends of at most `room` batches and returns their number; waits for one if `waits` and none has ended.
EXPORT int64_t vivace_reader_completed(void* reader, Ended* out, int64_t room, int64_t waits) {
    return static_cast<Reader*>(reader)->completed(out, room, waits != 0);
}

// Writes three numbers: reads, bytes, and nanoseconds with at least one read under way.
EXPORT void vivace_reader_counts(void* reader, int64_t* out) { static_cast<Reader*>(reader)->counts(out); }
