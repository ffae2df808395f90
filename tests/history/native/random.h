// Random numbers that are the same in every run and on every machine.
#pragma once

#include <cstdint>
#include <vector>

namespace paceline_tests {

class Random {
 public:
    explicit Random(uint64_t seed) : state_(seed * 0x9E3779B97F4A7C15ull + 1) {}

    // In 0 .. count-1.
    uint32_t below(uint32_t count) {
        state_ = state_ * 6364136223846793005ull + 1442695040888963407ull;
        return static_cast<uint32_t>(((state_ >> 33) * count) >> 31);
    }

    std::vector<int32_t> tokens(size_t count, uint32_t alphabet) {
        std::vector<int32_t> tokens(count);
        for (int32_t& token : tokens) token = static_cast<int32_t>(below(alphabet));
        return tokens;
    }

 private:
    uint64_t state_;
};

}  // namespace paceline_tests
