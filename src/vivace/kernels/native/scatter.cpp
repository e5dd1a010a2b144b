// Many reads of one file, scattered or long, in the order they were asked for, by threads of our own.
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "abi.h"
#include "checksum.h"
#include "reading.h"

namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t PAGE = 4096;

int64_t up_to_page(int64_t bytes) { return (bytes + PAGE - 1) / PAGE * PAGE; }

// Memory that begins on a page and grows.
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

// Reads that somebody waits for together.
struct Batch {
    char* memory;
    std::vector<Extent> extents;
    size_t next = 0;          // of those, the first that no thread has taken on
    int64_t taken = 0;        // bytes of it that were
    int64_t under_way = 0;    // reads that are not over
    size_t failed_place = 0;  // of the first read that failed, in the order of the extents
    int64_t failed = 0, failed_bytes = 0, error = 0;

    bool is_over() const { return next == extents.size() && under_way == 0; }

    // Whether what failed there was asked for before all else that failed.
    bool is_first(size_t place, int64_t offset) const {
        return !error || std::pair(place, offset) < std::pair(failed_place, failed);
    }
};

class Scatter {
public:
    Scatter(int file, int64_t threads, int64_t chunk_bytes, bool is_direct, PageSums pages)
        : file_(file), chunk_bytes_(chunk_bytes), is_direct_(is_direct), pages_(pages) {
        for (int64_t i = 0; i < threads; ++i) threads_.emplace_back([this] { work(); });
    }

    // Reads that have begun are finished, the others are given up.
    ~Scatter() {
        {
            const std::lock_guard<std::mutex> held(lock_);
            is_closed_ = true;
        }
        asked_.notify_all();
        for (std::thread& thread : threads_) thread.join();
    }

    int64_t submit(char* memory, const Extent* extents, int64_t count) {
        const std::lock_guard<std::mutex> held(lock_);
        auto batch = std::make_shared<Batch>();
        batch->memory = memory;
        batch->extents.assign(extents, extents + count);
        batches_[count_] = batch;
        if (count) waiting_.push_back(batch);
        asked_.notify_all();
        return count_++;
    }

    // Until nothing of it is under way. Writes error, offset and bytes of the first read that failed, and forgets it.
    void wait(int64_t number, int64_t* out) {
        std::unique_lock<std::mutex> held(lock_);
        const auto found = batches_.find(number);
        if (found == batches_.end()) return;
        const std::shared_ptr<Batch> batch = found->second;
        ended_.wait(held, [&] { return batch->is_over(); });
        out[0] = batch->error, out[1] = batch->failed, out[2] = batch->failed_bytes;
        batches_.erase(number);
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
            const std::shared_ptr<Batch> batch = waiting_.front();
            const size_t place = batch->next;
            const Extent& whole = batch->extents[place];
            const int64_t first = batch->taken, bytes = std::min(chunk_bytes_, whole.bytes - first);
            batch->taken += bytes, ++batch->under_way;
            if (batch->taken == whole.bytes) batch->taken = 0, ++batch->next;
            if (batch->next == batch->extents.size()) waiting_.pop_front();
            if (running_++ == 0) since_ = Clock::now();
            ++num_reads_, num_bytes_ += bytes;
            held.unlock();
            char* into = batch->memory + whole.place + first;
            int64_t offset = whole.offset + first;
            int64_t error = read(into, bytes, offset, pages);
            const int64_t damaged = error ? -1 : first_damaged(pages_, into, offset, bytes);
            if (damaged >= 0) error = DAMAGED, offset = damaged;
            held.lock();
            if (--running_ == 0) busy_ += Clock::now() - since_;
            --batch->under_way;
            if (error && batch->is_first(place, offset)) {
                batch->error = error, batch->failed = offset, batch->failed_bytes = bytes, batch->failed_place = place;
            }
            if (batch->is_over()) ended_.notify_all();
        }
    }

    // Direct reads are of whole pages into memory that begins on one; what is not goes through pages of the thread.
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

    const int file_;
    const int64_t chunk_bytes_;
    const bool is_direct_;
    const PageSums pages_;
    std::mutex lock_;
    std::condition_variable asked_, ended_;
    std::deque<std::shared_ptr<Batch>> waiting_;
    std::unordered_map<int64_t, std::shared_ptr<Batch>> batches_;
    std::vector<std::thread> threads_;
    int64_t count_ = 0, running_ = 0, num_reads_ = 0, num_bytes_ = 0;
    Clock::time_point since_{};
    Clock::duration busy_{};
    bool is_closed_ = false;
};

}  // namespace

// With the checksums of the file's pages, or none; they stay where they are until it is closed.
EXPORT void* vivace_scatter_open(
    int64_t file, int64_t threads, int64_t chunk_bytes, int64_t is_direct, const void* sums, int64_t num_pages) {
    const PageSums pages{static_cast<const uint32_t*>(sums), num_pages};
    return new Scatter(static_cast<int>(file), threads, chunk_bytes, is_direct != 0, pages);
}

EXPORT void vivace_scatter_close(void* scatter) { delete static_cast<Scatter*>(scatter); }

EXPORT int64_t vivace_scatter_submit(void* scatter, void* memory, const Extent* extents, int64_t count) {
    return static_cast<Scatter*>(scatter)->submit(static_cast<char*>(memory), extents, count);
}

// Writes three numbers: the first error or 0, and where and how much was to be read there.
EXPORT void vivace_scatter_wait(void* scatter, int64_t number, int64_t* out) {
    static_cast<Scatter*>(scatter)->wait(number, out);
}

// Writes three numbers: reads, bytes, and nanoseconds with at least one read under way.
EXPORT void vivace_scatter_counts(void* scatter, int64_t* out) { static_cast<Scatter*>(scatter)->counts(out); }
