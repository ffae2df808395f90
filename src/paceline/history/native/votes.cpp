// Votes: their weights, their table of what came true, and what both learn.
#include "votes.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace paceline {

namespace {

// The learning rate falls from their sum to the slow one; it is halfway after so many commits.
constexpr double kSlowRate = 0.02, kFastRate = 0.1, kFastCommits = 20.0;
// No commit moves a weight further than this, however large its batch.
constexpr double kMaxStep = 0.5;
constexpr double kMaxLog = 20.0;
constexpr double kPriorTrials = 100.0;
constexpr double kForget = 0.999;

// Where learning starts: what recorded rollouts of two tasks taught, rounded.
double length_log(int length) {
    if (length < 2) return length == 1 ? 1.8 : 0.0;
    return length <= 8 ? 1.2 + 1.2 * std::log2(static_cast<double>(length)) : 4.8 + 0.4 * std::log2(length / 8.0);
}
constexpr double kRecentLog = -0.5;  // of the present policy and the one before
constexpr double kTierLogs[kTiers] = {-0.3, -0.4, -0.9, -2.7, -2.7};
constexpr double kOffsetLogs[kOffsets] = {0.7, 1.0, 0.7, -0.4, -1.0, -1.6, -2.0, -1.2};
constexpr double kNoneLog = 1.2;

int bit_length(uint64_t value) {
#if defined(__GNUC__)
    return value == 0 ? 0 : 64 - __builtin_clzll(value);
#else
    int bits = 0;
    for (; value > 0; value >>= 1) ++bits;
    return bits;
#endif
}

}  // namespace

int age_bucket(int64_t versions) {
    return std::min(kAges - 1, bit_length(static_cast<uint64_t>(std::max<int64_t>(versions, 0))));
}

int offset_bucket(int64_t tokens) {
    return std::min(kOffsets - 1, bit_length(static_cast<uint64_t>(tokens < 0 ? -tokens : tokens)));
}

int calibration_cell(double share, const Support& support) {
    const int share_bucket = std::min(kShares - 1, static_cast<int>(share * kShares));
    const int longest = support.longest;
    const int length = longest <= 1    ? 0
                       : longest <= 2  ? 1
                       : longest <= 4  ? 2
                       : longest <= 8  ? 3
                       : longest <= 16 ? 4
                                       : 5;
    const int count = support.count <= 1 ? 0 : support.count <= 3 ? 1 : support.count <= 8 ? 2 : 3;
    const int tier = support.best.tier >= kElsewhere ? 1 : 0;
    const int age = support.best.age > 0 ? 1 : 0;
    return (((share_bucket * kCellLengths + length) * kSupports + count) * kCellTiers + tier) * kCellAges + age;
}

Votes::Votes() {
    for (int length = 0; length < kLengths; ++length) logs_[kLengthAt + length] = length_log(length);
    for (int age = 0; age < kAges; ++age) logs_[kAgeAt + age] = age < 2 ? kRecentLog : 0.0;
    std::copy(kTierLogs, kTierLogs + kTiers, logs_.begin() + kTierAt);
    std::copy(kOffsetLogs, kOffsetLogs + kOffsets, logs_.begin() + kOffsetAt);
    logs_[kNoneAt] = kNoneLog;
    refresh();
}

void Votes::refresh() {
    for (int i = 0; i < kWeights; ++i) factors_[i] = std::exp(logs_[i]);
}

double Votes::calibrated(double share, const Support& support) const {
    const int cell = calibration_cell(share, support);
    return (hits_[cell] + kPriorTrials * share) / (trials_[cell] + kPriorTrials);
}

double tally(const Votes& votes, const Vote* cast_votes, size_t count, std::vector<Support>& children) {
    children.clear();
    double total = votes.none();
    for (size_t i = 0; i < count; ++i) {
        const double weight = votes.weight(cast_votes[i].features);
        total += weight;
        cast(children, cast_votes[i].token, cast_votes[i].features, weight);
    }
    return total;
}

void Votes::study(const Vote* votes, size_t count, int32_t token, Lesson& lesson) const {
    thread_local std::vector<Support> children;
    const double total = tally(*this, votes, count, children);
    double right = 0;
    for (const Support& child : children) {
        lesson.outcomes.emplace_back(calibration_cell(child.weight / total, child), child.token == token);
        if (child.token == token) right = child.weight;
    }
    // Where no vote was right, "none of them" was.
    lesson.gradient[kNoneAt] += (right > 0 ? 0.0 : 1.0) - none() / total;
    for (size_t i = 0; i < count; ++i) {
        const Features& f = votes[i].features;
        const double weight = this->weight(f);
        const double step = (votes[i].token == token ? weight / right : 0.0) - weight / total;
        lesson.gradient[kLengthAt + f.length] += step;
        lesson.gradient[kAgeAt + f.age] += step;
        lesson.gradient[kTierAt + f.tier] += step;
        lesson.gradient[kOffsetAt + f.offset] += step;
    }
}

void Votes::learn(const Lesson* lessons, size_t count) {
    std::array<double, kWeights> gradient{};
    for (size_t one = 0; one < count; ++one) {
        const Lesson& lesson = lessons[one];
        for (int i = 0; i < kWeights; ++i) gradient[i] += lesson.gradient[i];
        for (const auto& [cell, hit] : lesson.outcomes) {
            trials_[cell] = trials_[cell] * kForget + 1.0;
            hits_[cell] = hits_[cell] * kForget + (hit ? 1.0 : 0.0);
        }
    }
    const double rate = kSlowRate + kFastRate / (1.0 + commits_ / kFastCommits);
    commits_ += 1.0;
    for (int i = 0; i < kWeights; ++i) {
        const double step = std::clamp(rate * gradient[i], -kMaxStep, kMaxStep);
        logs_[i] = std::clamp(logs_[i] + step, -kMaxLog, kMaxLog);
    }
    refresh();
}

std::vector<double> Votes::state() const {
    std::vector<double> state(logs_.begin(), logs_.end());
    state.insert(state.end(), hits_.begin(), hits_.end());
    state.insert(state.end(), trials_.begin(), trials_.end());
    state.push_back(commits_);
    return state;
}

void Votes::set_state(const std::vector<double>& state) {
    if (state.size() != kWeights + 2 * kCells + 1) throw std::invalid_argument("not the votes of this version");
    for (double value : state) {
        if (!std::isfinite(value)) throw std::invalid_argument("votes must be finite");
    }
    for (int i = 0; i < kWeights; ++i) logs_[i] = std::clamp(state[i], -kMaxLog, kMaxLog);
    for (int cell = 0; cell < kCells; ++cell) {
        trials_[cell] = std::max(0.0, state[kWeights + kCells + cell]);
        hits_[cell] = std::clamp(state[kWeights + cell], 0.0, trials_[cell]);
    }
    commits_ = std::max(0.0, state.back());
    refresh();
}

}  // namespace paceline
