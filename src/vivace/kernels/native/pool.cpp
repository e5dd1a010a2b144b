#include "pool.h"

#include <immintrin.h>
#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>

namespace {

constexpr int SPINS_BEFORE_SLEEP = 2000;  // some tens of microseconds between two calls of a decoding step
constexpr int SPINS_BEFORE_YIELD = 4000;  // the one we wait for may have lost its core
constexpr int64_t MAX_THREADS = 256;

struct alignas(64) Progress {
    std::atomic<int64_t> claimed{0};
    std::atomic<int64_t> done{0};
};

struct Job {
    int64_t phases;
    const int64_t* counts;
    Item item;
    const void* context;
    Progress* progress;
    std::atomic<int64_t> places;  // threads that may still join

    void work() {
        for (int64_t phase = 0; phase < phases; ++phase) {
            Progress& mine = progress[phase];
            const int64_t count = counts[phase];
            if (count == 0) continue;
            int64_t finished = 0;
            for (;;) {
                const int64_t next = mine.claimed.fetch_add(1, std::memory_order_relaxed);
                if (next >= count) break;
                item(context, phase, next);
                ++finished;
            }
            if (finished) mine.done.fetch_add(finished, std::memory_order_acq_rel);
            for (int spins = 0; mine.done.load(std::memory_order_acquire) < count; ++spins) {
                if (spins < SPINS_BEFORE_YIELD)
                    _mm_pause();
                else
                    sched_yield();
            }
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
        job.work();
        job_.store(nullptr);
        while (inside_.load() != 0) _mm_pause();  // nobody may still look at the job, which lives on our stack
        return true;
    }

private:
    void grow(int64_t workers) {
        workers = workers < MAX_THREADS ? workers : MAX_THREADS;
        try {
            for (; workers_ < workers; ++workers_) std::thread([this] { serve(); }).detach();
        } catch (const std::system_error&) {
            // No more threads to be had: those there are do the work.
        }
    }

    void serve() {
        uint32_t last = call_.load() - 1;  // the call that made this thread is still to be served
        for (;;) {
            for (int spins = 0; call_.load() == last && spins < SPINS_BEFORE_SLEEP; ++spins) _mm_pause();
            call_.wait(last);
            last = call_.load();
            inside_.fetch_add(1);
            Job* job = job_.load();
            if (job != nullptr && job->places.fetch_sub(1) > 0) job->work();
            inside_.fetch_sub(1);
        }
    }

    std::mutex callers_;
    std::atomic<Job*> job_{nullptr};
    std::atomic<uint32_t> call_{0};
    std::atomic<int64_t> inside_{0};
    int64_t workers_ = 0;
};

std::atomic<Pool*> the_pool{nullptr};

// Threads do not survive a fork: the child starts its own. What the parent had is left where it is.
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
        const std::unique_ptr<Progress[]> progress(new Progress[phases]);
        Job job{phases, counts, item, context, progress.get(), {threads - 1}};
        if (pool().try_run(threads, job)) return;
    }
    for (int64_t phase = 0; phase < phases; ++phase)
        for (int64_t index = 0; index < counts[phase]; ++index) item(context, phase, index);
}
