// Weights and calibration: what they start from, what they learn and what they refuse.
#include <cmath>
#include <limits>
#include <stdexcept>
#include <vector>

#include "check.h"
#include "votes.h"

using paceline::Features;
using paceline::Lesson;
using paceline::Support;
using paceline::tally;
using paceline::Vote;
using paceline::Votes;

namespace {

const Features kLong{16, 1, paceline::kHistory, 0};
const Features kShort{2, 1, paceline::kHistory, 0};
const Features kFromSibling{4, 0, paceline::kSibling, 0};
const Features kFromHistory{4, 1, paceline::kHistory, 0};

Vote vote(int32_t token, const Features& features) {
    Vote cast{};
    cast.token = token;
    cast.features = features;
    return cast;
}

bool refuses(Votes& votes, const std::vector<double>& state) {
    try {
        votes.set_state(state);
    } catch (const std::invalid_argument&) {
        return true;
    }
    return false;
}

void teach(Votes& votes, const std::vector<Vote>& cast, int32_t token) {
    Lesson lesson;
    votes.study(cast.data(), cast.size(), token, lesson);
    votes.learn(&lesson, 1);
}

}  // namespace

TEST(a_longer_match_counts_more) {
    const Votes votes;
    CHECK(votes.weight(kLong) > votes.weight(kShort));
    CHECK(votes.none() > 0);
}

TEST(votes_are_grouped_by_token_in_the_order_of_their_first_appearance) {
    const Votes votes;
    const std::vector<Vote> cast = {vote(7, kShort), vote(3, kFromSibling), vote(7, kLong), vote(7, kShort)};
    std::vector<Support> children;
    const double total = tally(votes, cast.data(), cast.size(), children);
    CHECK(children.size() == 2);
    CHECK(children[0].token == 7 && children[0].count == 3 && children[0].longest == 16);
    CHECK(children[0].best.length == kLong.length);
    CHECK(children[1].token == 3 && children[1].count == 1);
    CHECK(std::fabs(total - (votes.none() + children[0].weight + children[1].weight)) < 1e-12);
}

TEST(learning_moves_weight_to_what_was_right) {
    Votes votes;
    const std::vector<Vote> cast = {vote(1, kFromSibling), vote(2, kFromHistory)};
    const double before = votes.weight(kFromSibling) / votes.weight(kFromHistory);
    for (int i = 0; i < 50; ++i) teach(votes, cast, 1);
    const double after = votes.weight(kFromSibling) / votes.weight(kFromHistory);
    CHECK(after > before);
    const double none = votes.none();
    for (int i = 0; i < 50; ++i) teach(votes, cast, 3);
    CHECK(votes.none() > none);
}

TEST(no_commit_moves_a_weight_far) {
    Votes votes;
    const std::vector<double> before = votes.state();
    const std::vector<Vote> cast(64, vote(1, kFromSibling));
    std::vector<Lesson> lessons(1000);
    for (Lesson& lesson : lessons) votes.study(cast.data(), cast.size(), 2, lesson);
    votes.learn(lessons.data(), lessons.size());
    const std::vector<double> after = votes.state();
    for (int i = 0; i < paceline::kWeights; ++i) CHECK(std::fabs(after[i] - before[i]) <= 0.5 + 1e-12);
}

TEST(a_share_is_corrected_by_how_often_it_came_true) {
    Votes votes;
    Support support;
    support.count = 1;
    support.longest = 4;
    support.best = kFromHistory;
    CHECK(std::fabs(votes.calibrated(0.9, support) - 0.9) < 1e-12);  // nothing is known yet
    Lesson lesson;
    for (int i = 0; i < 3000; ++i) lesson.outcomes.emplace_back(calibration_cell(0.9, support), i % 4 == 0);
    votes.learn(&lesson, 1);
    const double corrected = votes.calibrated(0.9, support);
    CHECK(corrected > 0.2 && corrected < 0.35);
    support.longest = 1;
    CHECK(std::fabs(votes.calibrated(0.9, support) - 0.9) < 1e-12);  // another cell
    for (double share = 0; share <= 1; share += 0.01) {
        CHECK(votes.calibrated(share, support) >= 0 && votes.calibrated(share, support) <= 1);
    }
}

TEST(every_share_and_support_has_a_cell) {
    for (double share : {0.0, 0.3, 1.0}) {
        for (int count : {0, 1, 1000}) {
            for (uint8_t longest : {0, 1, 32}) {
                for (const Features& best : {kFromSibling, Features{1, 15, paceline::kElsewhereLive, 7}}) {
                    Support support;
                    support.count = count;
                    support.longest = longest;
                    support.best = best;
                    const int cell = calibration_cell(share, support);
                    CHECK(cell >= 0 && cell < paceline::kCells);
                }
            }
        }
    }
}

TEST(distances_fall_into_buckets) {
    CHECK(paceline::age_bucket(-5) == 0 && paceline::age_bucket(0) == 0 && paceline::age_bucket(1) == 1);
    CHECK(paceline::age_bucket(INT64_MAX) == paceline::kAges - 1);
    CHECK(paceline::offset_bucket(0) == 0 && paceline::offset_bucket(3) == paceline::offset_bucket(-3));
    CHECK(paceline::offset_bucket(1 << 20) == paceline::kOffsets - 1);
}

TEST(a_state_comes_back_equal_and_nonsense_is_refused) {
    Votes votes;
    for (int i = 0; i < 20; ++i) teach(votes, {vote(1, kFromSibling), vote(2, kLong)}, i % 3);
    const std::vector<double> state = votes.state();
    Votes other;
    other.set_state(state);
    CHECK(other.state() == state);
    std::vector<double> bad = state;
    bad[3] = std::numeric_limits<double>::quiet_NaN();
    CHECK(refuses(other, bad));
    bad[3] = std::numeric_limits<double>::infinity();
    CHECK(refuses(other, bad));
    bad.pop_back();
    CHECK(refuses(other, bad));
    CHECK(refuses(other, {}));
    CHECK(other.state() == state);
    std::vector<double> wild(state.size(), -1e300);
    for (size_t i = 0; i < wild.size(); i += 2) wild[i] = 1e300;
    other.set_state(wild);  // finite, so that it is taken, within bounds
    for (const Features& features : {kLong, kShort, kFromSibling}) {
        CHECK(std::isfinite(other.weight(features)) && other.weight(features) > 0);
    }
}
