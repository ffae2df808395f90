// Threads that share loops: every index once, whoever runs it.
#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "check.h"
#include "pool.h"

using paceline::Pool;

TEST(every_index_is_run_once_by_a_thread_of_the_pool) {
    for (size_t threads : {0, 1, 3}) {
        Pool pool(threads);
        CHECK(pool.threads() == threads + 1);
        for (size_t count : {0, 1, 2, 7, 100}) {
            for (int repeat = 0; repeat < 20; ++repeat) {
                std::vector<int> runs(count);  // no two threads write one entry, which the thread sanitizer checks
                std::atomic<size_t> highest{0};
                pool.run(count, [&](size_t index, size_t thread) {
                    ++runs[index];
                    if (thread > threads) highest = thread;
                });
                CHECK(runs == std::vector<int>(count, 1));
                CHECK(highest == 0);
            }
        }
    }
}

TEST(a_background_loop_is_done_once_it_is_waited_for) {
    for (size_t threads : {0, 1, 3}) {
        Pool pool(threads);
        for (int repeat = 0; repeat < 20; ++repeat) {
            std::vector<int> runs(50);
            pool.start(runs.size(), [&runs](size_t index, size_t) { ++runs[index]; });
            pool.settle(true);
            CHECK(runs == std::vector<int>(50, 1));
            pool.settle(true);  // nothing is left to wait for
        }
    }
}

TEST(a_background_loop_that_is_not_waited_for_leaves_what_has_not_begun) {
    Pool pool(2);
    for (int repeat = 0; repeat < 20; ++repeat) {
        std::atomic<int> begun{0}, done{0};
        pool.start(1000, [&](size_t, size_t) {
            ++begun;
            std::this_thread::sleep_for(std::chrono::microseconds(50));
            ++done;
        });
        pool.settle(false);
        CHECK(begun == done);  // nothing of it runs any more
        CHECK(done < 1000);
    }
}

TEST(a_foreground_loop_goes_on_beside_a_background_one) {
    Pool pool(2);
    for (int repeat = 0; repeat < 20; ++repeat) {
        std::atomic<int> behind{0}, front{0};
        pool.start(100, [&](size_t, size_t) { ++behind; });
        pool.run(100, [&](size_t, size_t) { ++front; });
        CHECK(front == 100);
        pool.settle(true);
        CHECK(behind == 100);
    }
}

TEST(a_pool_ends_with_a_background_loop_in_progress) {
    for (int repeat = 0; repeat < 20; ++repeat) {
        std::atomic<int> begun{0}, done{0};
        {
            Pool pool(3);
            pool.start(100, [&](size_t, size_t) {
                ++begun;
                ++done;
            });
        }
        CHECK(begun == done);
    }
}
