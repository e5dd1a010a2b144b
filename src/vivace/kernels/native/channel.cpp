// Reads of one file by threads of our own, the most urgent first. Between two reads no interpreter is asked, so that
// the thread that computes is not held up by those that read.
#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <thread>
#include <tuple>
#include <unistd.h>
#include <unordered_map>
#include <vector>

#include "abi.h"
#include "checksum.h"
#include "reading.h"

namespace {

using Urgency = std::tuple<int64_t, int64_t, int64_t>;  // due, rank, and who came first

struct Load {
    Urgency urgency;
    int64_t offset, bytes;
    char* into;
    int64_t begun = 0;      // bytes that a thread has taken on
    int64_t under_way = 0;  // reads that are not over
    int64_t error = 0;
};

struct Finished {
    int64_t number, error;
};

class Channel {
public:
    Channel(int file, int64_t threads, int64_t chunk_bytes, PageSums pages)
        : file_(dup(file)), chunk_bytes_(chunk_bytes), pages_(pages) {
        for (int64_t i = 0; i < threads; ++i) threads_.emplace_back([this] { work(); });
    }

    ~Channel() {
        {
            const std::lock_guard<std::mutex> held(lock_);
            is_closed_ = true;
        }
        asked_.notify_all();
        for (std::thread& thread : threads_) thread.join();
        if (file_ >= 0) close(file_);
    }

    void submit(const Read& r) {
        {
            const std::lock_guard<std::mutex> held(lock_);
            const Urgency urgency{r.due, r.rank, count_++};
            loads_[r.number] = Load{urgency, r.offset, r.bytes, static_cast<char*>(r.into)};
            waiting_[urgency] = r.number;
        }
        r.bytes > chunk_bytes_ ? asked_.notify_all() : asked_.notify_one();
    }

    // A load that has not been taken on to its end gets another place in the queue.
    void reschedule(int64_t number, int64_t due) {
        const std::lock_guard<std::mutex> held(lock_);
        const auto found = loads_.find(number);
        if (found == loads_.end() || waiting_.erase(found->second.urgency) == 0) return;
        std::get<0>(found->second.urgency) = due;
        waiting_[found->second.urgency] = number;
    }

    int64_t finished(Finished* out, int64_t room, bool waits) {
        std::unique_lock<std::mutex> held(lock_);
        if (waits) arrived_.wait(held, [this] { return !finished_.empty() || loads_.empty(); });
        const int64_t count = std::min<int64_t>(room, finished_.size());
        for (int64_t i = 0; i < count; ++i) out[i] = finished_[i];
        finished_.erase(finished_.begin(), finished_.begin() + count);
        return count;
    }

private:
    void work() {
        std::unique_lock<std::mutex> held(lock_);
        for (;;) {
            asked_.wait(held, [this] { return is_closed_ || !waiting_.empty(); });
            if (is_closed_) return;
            const int64_t number = waiting_.begin()->second;
            Load& load = loads_[number];  // stays where it is while others come and go
            const int64_t first = load.begun, bytes = std::min(chunk_bytes_, load.bytes - first);
            load.begun += bytes, ++load.under_way;
            if (load.begun == load.bytes) waiting_.erase(load.urgency);
            held.unlock();
            const int64_t error = read(load.into + first, bytes, load.offset + first);
            held.lock();
            if (error && !load.error) {
                load.error = error;
                waiting_.erase(load.urgency), load.begun = load.bytes;  // the rest is of no use
            }
            if (--load.under_way == 0 && load.begun == load.bytes) {
                finished_.push_back({number, load.error});
                loads_.erase(number);
                arrived_.notify_all();
            }
        }
    }

    int64_t read(char* into, int64_t bytes, int64_t offset) const {
        const int64_t error = read_all(file_, into, bytes, offset, bytes);
        return error || first_damaged(pages_, into, offset, bytes) < 0 ? error : DAMAGED;
    }

    const int file_;
    const int64_t chunk_bytes_;
    const PageSums pages_;
    std::mutex lock_;
    std::condition_variable asked_, arrived_;
    std::unordered_map<int64_t, Load> loads_;
    std::map<Urgency, int64_t> waiting_;
    std::vector<Finished> finished_;
    std::vector<std::thread> threads_;
    int64_t count_ = 0;
    bool is_closed_ = false;
};

}  // namespace

// With the checksums of the file's pages, or none; they stay where they are until it is closed.
EXPORT void* vivace_channel_open(
    int64_t file, int64_t threads, int64_t chunk_bytes, const void* sums, int64_t num_pages) {
    return new Channel(
        static_cast<int>(file), threads, chunk_bytes, PageSums{static_cast<const uint32_t*>(sums), num_pages});
}

EXPORT void vivace_channel_close(void* channel) { delete static_cast<Channel*>(channel); }

EXPORT void vivace_channel_submit(void* channel, const Read* read) { static_cast<Channel*>(channel)->submit(*read); }

EXPORT void vivace_channel_reschedule(void* channel, int64_t number, int64_t due) {
    static_cast<Channel*>(channel)->reschedule(number, due);
}

// Writes pairs of a load's number and its error, 0 where there is none; returns how many.
EXPORT int64_t vivace_channel_finished(void* channel, int64_t* out, int64_t room, int64_t waits) {
    return static_cast<Channel*>(channel)->finished(reinterpret_cast<Finished*>(out), room, waits != 0);
}
