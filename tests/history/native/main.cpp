// Runs every registered test; exits 1 if a check did not hold or no test was registered.
#include <cstdio>

#include "check.h"

int main() {
    int failed_tests = 0;
    for (const auto& test : paceline_tests::tests()) {
        const int before = paceline_tests::failures();
        test.run();
        if (paceline_tests::failures() != before) {
            std::printf("FAILED %s\n", test.name);
            ++failed_tests;
        }
    }
    const int count = static_cast<int>(paceline_tests::tests().size());
    std::printf("%d C++ tests, %d failed\n", count, failed_tests);
    return count == 0 || failed_tests > 0;
}
