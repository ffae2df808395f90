// A few threads that share loops: one in the foreground, which the caller joins, and one behind it.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstddef>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace paceline {

// A loop's body gets the index and the number of the thread that runs it: 0 is the caller.
using Body = std::function<void(size_t index, size_t thread)>;

class Pool {
 public:
    explicit Pool(size_t threads) {
        for (size_t number = 1; number <= threads; ++number) {
            workers_.emplace_back([this, number] { work(number); });
        }
    }
    ~Pool() {
        settle(false);
        {
            std::lock_guard<std::mutex> lock(mutex_);
            stop_ = true;
        }
        wake_.notify_all();
        for (std::thread& worker : workers_) worker.join();
    }

    size_t threads() const { return workers_.size() + 1; }

    // Runs the body for 0 .. count-1 on the caller and the workers; returns when all are done.
    void run(size_t count, const Body& body) {
        if (workers_.empty() || count < 2) {
            for (size_t index = 0; index < count; ++index) body(index, 0);
            return;
        }
        std::unique_lock<std::mutex> lock(mutex_);
        front_ = {&body, count, 0, 0, 4 * threads()};
        wake_.notify_all();
        help(front_, lock, 0);
        done_.wait(lock, [this] { return front_.running == 0; });
        front_.body = nullptr;
    }

    // Starts a loop behind the caller's back. One at a time: `settle` comes first. Without workers it runs at once.
    void start(size_t count, Body body) {
        if (workers_.empty()) {
            for (size_t index = 0; index < count; ++index) body(index, 0);
            return;
        }
        {
            std::lock_guard<std::mutex> lock(mutex_);
            back_body_ = std::move(body);
            back_ = {&back_body_, count, 0, 0, count};
        }
        wake_.notify_all();
    }

    // Ends the background loop: with `wait` all of it is done, the caller helping; without, what has not begun is left.
    void settle(bool wait) {
        std::unique_lock<std::mutex> lock(mutex_);
        if (back_.body == nullptr) return;
        if (wait) {
            help(back_, lock, 0);
        } else {
            back_.next = back_.count;
        }
        done_.wait(lock, [this] { return back_.running == 0; });
        back_.body = nullptr;
    }

 private:
    struct Loop {
        const Body* body = nullptr;
        size_t count = 0, next = 0, running = 0;
        size_t shares =
            1;  // what is left is cut into so many; they shrink towards the end, so nobody waits long for it
        bool open() const { return body != nullptr && next < count; }
    };

    // Takes indices of a loop until there are none left. The lock is held between them only.
    void help(Loop& loop, std::unique_lock<std::mutex>& lock, size_t thread) {
        while (loop.open()) {
            const size_t first = loop.next;
            const size_t share = std::max<size_t>(1, (loop.count - first) / loop.shares);
            loop.next += share;
            ++loop.running;
            const Body& body = *loop.body;
            lock.unlock();
            for (size_t index = first; index < first + share; ++index) body(index, thread);
            lock.lock();
            if (--loop.running == 0 && !loop.open()) done_.notify_all();
        }
    }

    void work(size_t number) {
        std::unique_lock<std::mutex> lock(mutex_);
        while (true) {
            wake_.wait(lock, [this] { return stop_ || front_.open() || back_.open(); });
            if (stop_) return;
            help(front_.open() ? front_ : back_, lock, number);
        }
    }

    std::mutex mutex_;
    std::condition_variable wake_, done_;
    Loop front_, back_;
    Body back_body_;
    bool stop_ = false;
    std::vector<std::thread> workers_;
};

}  // namespace paceline
