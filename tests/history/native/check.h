// The smallest test frame that does: TEST registers a function, CHECK prints where a condition does not hold.
#pragma once

#include <atomic>
#include <cstdio>
#include <vector>

namespace paceline_tests {

struct Test {
    const char* name;
    void (*run)();
};

inline std::vector<Test>& tests() {
    static std::vector<Test> registered;
    return registered;
}

inline std::atomic<int>& failures() {
    static std::atomic<int> count{0};
    return count;
}

inline int register_test(const char* name, void (*run)()) {
    tests().push_back({name, run});
    return 0;
}

}  // namespace paceline_tests

#define TEST(name)                                                                    \
    static void name();                                                               \
    static const int registered_##name = paceline_tests::register_test(#name, &name); \
    static void name()

// Goes on after a failure, so that one run shows all of them. Threads may use it.
#define CHECK(...)                                                                             \
    do {                                                                                       \
        if (!(__VA_ARGS__)) {                                                                  \
            std::printf("%s:%d: CHECK(%s) does not hold\n", __FILE__, __LINE__, #__VA_ARGS__); \
            ++paceline_tests::failures();                                                      \
        }                                                                                      \
    } while (false)
