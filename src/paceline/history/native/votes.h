// How much a match counts, and what a share of the votes is worth: both learned online from what the policy said.
//
// A match votes for the token that followed it with weight exp(length + age + tier + offset), one learned number for
// each of its features; a learned weight stands for "none of them". A child's share of the votes is its probability by
// this conditional logit model, corrected by a table of how often such shares came true.
#pragma once

#include <stddef.h>

#include <array>
#include <cstdint>
#include <utility>
#include <vector>

namespace paceline {

constexpr int kMaxLength = 32;

enum Tier : uint8_t { kOwn = 0, kSibling = 1, kHistory = 2, kElsewhere = 3, kElsewhereLive = 4 };

struct Features {
    uint8_t length, age, tier, offset;
};

// A vote as it is kept for learning: what it was for, and what it was cast by.
struct Vote {
    int32_t token;
    Features features;
};

// Where the parts of the weights lie in one flat array.
constexpr int kLengthAt = 0, kLengths = kMaxLength + 1;
constexpr int kAgeAt = kLengthAt + kLengths, kAges = 16;
constexpr int kTierAt = kAgeAt + kAges, kTiers = 5;
constexpr int kOffsetAt = kTierAt + kTiers, kOffsets = 8;
constexpr int kNoneAt = kOffsetAt + kOffsets;
constexpr int kWeights = kNoneAt + 1;

constexpr int kShares = 12, kCellLengths = 6, kSupports = 4, kCellTiers = 2, kCellAges = 2;
constexpr int kCells = kShares * kCellLengths * kSupports * kCellTiers * kCellAges;

int age_bucket(int64_t versions);
int offset_bucket(int64_t tokens);

// What speaks for one child, beside its share.
struct Support {
    int32_t token = 0;
    double weight = 0;
    double best_weight = -1;
    int count = 0;
    Features best{0, 0, 0, 0};  // of the heaviest vote
    uint8_t longest = 0;
};

int calibration_cell(double share, const Support& support);

// The gradient of the log-likelihood and the calibration's outcomes of one request's tokens.
struct Lesson {
    std::array<double, kWeights> gradient{};
    std::vector<std::pair<int, bool>> outcomes;
    void clear() {
        gradient.fill(0);
        outcomes.clear();
    }
};

class Votes {
 public:
    Votes();

    // The part of a weight that does not change as a match grows.
    double standing(const Features& f) const {
        return factors_[kAgeAt + f.age] * factors_[kTierAt + f.tier] * factors_[kOffsetAt + f.offset];
    }
    double weight(int length, double standing) const { return factors_[kLengthAt + length] * standing; }
    double weight(const Features& f) const { return weight(f.length, standing(f)); }
    double none() const { return factors_[kNoneAt]; }
    double calibrated(double share, const Support& support) const;

    // Adds what `token`, which came after these votes, teaches.
    void study(const Vote* votes, size_t count, int32_t token, Lesson& lesson) const;
    // Takes the lessons of one commit together, in order.
    void learn(const Lesson* lessons, size_t count);

    // Weights, hits and trials of the calibration's cells, and the number of commits.
    std::vector<double> state() const;
    void set_state(const std::vector<double>& state);

 private:
    void refresh();

    std::array<double, kWeights> logs_;
    std::array<double, kWeights> factors_;
    std::array<double, kCells> hits_{}, trials_{};
    double commits_ = 0;
};

// Counts one vote for its token's child; children stand in the order of their first vote.
inline void cast(std::vector<Support>& children, int32_t token, const Features& features, double weight) {
    Support* child = children.data();
    Support* const end = child + children.size();
    while (child != end && child->token != token) ++child;
    if (child == end) {
        children.emplace_back();
        child = &children.back();
        child->token = token;
    }
    child->weight += weight;
    ++child->count;
    if (features.length > child->longest) child->longest = features.length;
    if (weight > child->best_weight) {
        child->best_weight = weight;
        child->best = features;
    }
}

// Groups votes by token in the order of their first appearance; returns the sum of all weights and `none`.
double tally(const Votes& votes, const Vote* cast_votes, size_t count, std::vector<Support>& children);

}  // namespace paceline
