#include "pool.h"

#include <immintrin.h>
#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>

namespace {

constexpr int SPINS_BEFORE_YIELD = 4000;  // then yield, since the thread that is waited for may have lost its core
constexpr int64_t MAX_THREADS = 256;

// How long a thread spins for the next call before it sleeps. Waking a thread takes longer than a phase, on a virtual
// machine longer than a layer, and between two calls of a decoding step lies at most a millisecond of Python.
constexpr std::chrono::milliseconds LOOKOUT{2};

// Waits a little before a thread looks again, for the spins-th time.
inline void pause(int spins) {
    if (spins < SPINS_BEFORE_YIELD)
        _mm_pause();
    else
        sched_yield();
}

// The items first..stop-1 that are left of a thread's share of a phase, as two halves of one atomic word, so that both
// ends change together. The owner takes items in order, so that it reads memory in order; other threads take the last
// item. Aligned to a line of the cache, so that shares do not slow each other down.
struct alignas(64) Share {
    std::atomic<uint64_t> left;

    static uint64_t of(uint64_t first, uint64_t stop) { return first << 32 | stop; }

    int64_t claim(bool is_owner) {
        uint64_t now = left.load(std::memory_order_relaxed);
        for (;;) {
            const uint64_t first = now >> 32, stop = now & 0xffffffff;
            if (first >= stop) return -1;
            const uint64_t rest = is_owner ? of(first + 1, stop) : of(first, stop - 1);
            if (left.compare_exchange_weak(now, rest, std::memory_order_relaxed))
                return (int64_t)(is_owner ? first : stop - 1);
        }
    }
};

struct alignas(64) Progress {
    std::atomic<int64_t> done{0};
};

struct Job {
    int64_t phases, threads;
    const int64_t* counts;
    Item item;
    const void* context;
    std::unique_ptr<Progress[]> progress;
    std::unique_ptr<Share[]> shares;  // (phases, threads)
    std::atomic<int64_t> places;      // threads that may still join

    Job(int64_t threads, int64_t phases, const int64_t* counts, Item item, const void* context)
        : phases(phases),
          threads(threads),
          counts(counts),
          item(item),
          context(context),
          progress(new Progress[phases]),
          shares(new Share[phases * threads]),
          places(threads - 1) {
        for (int64_t i = 0; i < phases * threads; ++i) {
            const int64_t count = counts[i / threads], thread = i % threads;
            shares[i].left.store(Share::of(count * thread / threads, count * (thread + 1) / threads));
        }
    }

    int64_t claim(int64_t phase, int64_t thread) {
        Share* const all = &shares[phase * threads];
        int64_t item = all[thread].claim(true);
        for (int64_t i = 1; item < 0 && i < threads; ++i) item = all[(thread + i) % threads].claim(false);
        return item;
    }

    void work(int64_t thread) {
        for (int64_t phase = 0; phase < phases; ++phase) {
            Progress& mine = progress[phase];
            const int64_t count = counts[phase];
            if (count == 0) continue;
            int64_t finished = 0;
            for (int64_t next; (next = claim(phase, thread)) >= 0; ++finished) item(context, phase, next);
            if (finished) mine.done.fetch_add(finished, std::memory_order_acq_rel);
            for (int spins = 0; mine.done.load(std::memory_order_acquire) < count; ++spins) pause(spins);
        }
    }
};

class Pool {
public:
    bool try_run(int64_t threads, Job& job) {
        std::unique_lock<std::mutex> caller(callers_, std::try_to_lock);
        if (!caller.owns_lock()) return false;
        grow(threads - 1);
        job_.store(&job);
        call_.fetch_add(1);
        call_.notify_all();
        job.work(0);
        job_.store(nullptr);
        for (int spins = 0; inside_.load() != 0; ++spins) pause(spins);  // the job is on this stack, and in use till then
        return true;
    }

private:
    void grow(int64_t workers) {
        workers = workers < MAX_THREADS ? workers : MAX_THREADS;
        try {
            for (; workers_ < workers; ++workers_) std::thread([this] { serve(); }).detach();
        } catch (const std::system_error&) {
            // The system gives no more threads; those that exist do the work.
        }
    }

    void serve() {
        uint32_t last = call_.load() - 1;  // so that the call that made this thread counts as new
        for (;;) {
            look_out(last);
            call_.wait(last);
            last = call_.load();
            inside_.fetch_add(1);
            Job* job = job_.load();
            const int64_t place = job == nullptr ? 0 : job->places.fetch_sub(1);
            if (place > 0) job->work(place);
            inside_.fetch_sub(1);
        }
    }

    // Returns when there is a new call, or when none came for LOOKOUT.
    void look_out(uint32_t last) const {
        const auto end = std::chrono::steady_clock::now() + LOOKOUT;
        for (int spins = 0; call_.load() == last; ++spins) {
            _mm_pause();
            if (spins < SPINS_BEFORE_YIELD) continue;
            sched_yield();  // other programs get this core if they need it
            if (std::chrono::steady_clock::now() > end) return;
        }
    }

    std::mutex callers_;
    std::atomic<Job*> job_{nullptr};
    std::atomic<uint32_t> call_{0};
    std::atomic<int64_t> inside_{0};
    int64_t workers_ = 0;
};

std::atomic<Pool*> the_pool{nullptr};

// Threads do not survive a fork, so the child makes a new pool. The parent's is not freed, since its locks may be held.
void forget_pool() { the_pool.store(nullptr); }

Pool& pool() {
    Pool* found = the_pool.load();
    if (found != nullptr) return *found;
    static const int registered = pthread_atfork(nullptr, nullptr, forget_pool);
    (void)registered;
    Pool* made = new Pool;
    if (the_pool.compare_exchange_strong(found, made)) return *made;
    delete made;  // another caller was first; nobody has seen this one
    return *found;
}

}  // namespace

void run_phases(int64_t threads, int64_t phases, const int64_t* counts, Item item, const void* context) {
    if (threads > 1) {
        Job job(threads, phases, counts, item, context);
        if (pool().try_run(threads, job)) return;
    }
    for (int64_t phase = 0; phase < phases; ++phase)
        for (int64_t index = 0; index < counts[phase]; ++index) item(context, phase, index);
}
