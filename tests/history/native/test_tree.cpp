// Drafts grown from a few sequences: their shape, their probabilities and where they come from.
#include <algorithm>
#include <vector>

#include "check.h"
#include "random.h"
#include "tree.h"

using paceline::Arena;
using paceline::Evidence;
using paceline::GrowthLimits;
using paceline::Kind;
using paceline::Node;
using paceline::Scratch;
using paceline::Sequence;
using paceline::Tree;
using paceline::Votes;
using paceline_tests::Random;

namespace {

using Tokens = std::vector<int32_t>;

Sequence* add(Arena& arena, Kind kind, int64_t shard, const Tokens& tokens) {
    Sequence* sequence = arena.open(kind, shard, 0, 0);
    arena.append(sequence, tokens.data(), tokens.size());
    return sequence;
}

Tokens numbers(int32_t first, int32_t last) {
    Tokens tokens;
    for (int32_t token = first; token < last; ++token) tokens.push_back(token);
    return tokens;
}

struct Grown {
    Arena own{{8, 2, 1}, paceline::kMaxLength};
    Arena elsewhere{{8, 2}, paceline::kMaxLength};
    Evidence evidence;
    Votes votes;
    Scratch scratch;
    Tree tree;

    Grown() {
        evidence.own = &own;
        evidence.shard = 1;
    }
    const Tree& grow(const Tokens& context, const GrowthLimits& limits) {
        paceline::grow(evidence, votes, context, 0, limits, scratch, tree);
        return tree;
    }
    Tokens chain(const Tokens& context, int budget) {
        grow(context, {budget, 1e-6, 32});
        return tree.path(static_cast<int>(tree.nodes.size()) - 1);
    }
};

void check_shape(const Tree& tree, const GrowthLimits& limits) {
    CHECK(static_cast<int>(tree.nodes.size()) <= limits.budget + 1);
    for (size_t i = 1; i < tree.nodes.size(); ++i) {
        const Node& node = tree.nodes[i];
        CHECK(node.parent >= 0 && node.parent < static_cast<int>(i));
        const Node& parent = tree.nodes[static_cast<size_t>(node.parent)];
        CHECK(node.depth == parent.depth + 1);
        CHECK(node.prob >= limits.floor && node.prob <= parent.prob);
        CHECK(tree.child(node.parent, node.token) == static_cast<int>(i));
        CHECK(tree.path(static_cast<int>(i)).size() == static_cast<size_t>(node.depth));
        for (const auto& leaf : tree.leaves) CHECK(leaf.prob <= node.prob);  // best first
    }
}

}  // namespace

TEST(a_chain_goes_on_across_blocks_until_the_sequence_ends) {
    Grown grown;
    add(grown.own, Kind::kept, 1, numbers(0, 100));
    CHECK(grown.chain({3, 4}, 200) == numbers(5, 100));
    CHECK(grown.chain({98}, 200) == numbers(99, 100));
    CHECK(grown.chain({99}, 200).empty());
    CHECK(grown.chain({1000}, 200).empty());
    CHECK(grown.chain({}, 200).empty());
}

TEST(a_path_that_leaves_one_sequence_is_looked_up_in_the_others) {
    Grown grown;
    add(grown.own, Kind::kept, 1, {1, 2, 3});
    add(grown.own, Kind::kept, 1, {9, 2, 3, 4, 5});
    CHECK(grown.chain({1}, 10) == Tokens({2, 3, 4, 5}));
}

TEST(sources_name_the_tier_of_the_heaviest_vote) {
    Grown grown;
    grown.evidence.elsewhere = &grown.elsewhere;
    grown.evidence.self = add(grown.own, Kind::live, 1, {10, 11, 12, 10});
    add(grown.own, Kind::live, 1, {20, 21});
    add(grown.own, Kind::kept, 1, {30, 31});
    add(grown.own, Kind::prompt, 1, {40, 41});
    add(grown.own, Kind::dead, 1, {50, 51});
    add(grown.elsewhere, Kind::kept, 2, {60, 61, 62});
    add(grown.elsewhere, Kind::kept, 1, {70, 71, 72});  // the asking request's own prompt
    const auto source = [&grown](const Tokens& context) {
        const Tree& tree = grown.grow(context, {1, 1e-6, 32});
        return tree.nodes.size() < 2 ? 0 : tree.nodes[1].source;
    };
    CHECK(source({10}) == 1 && source({20}) == 2 && source({30}) == 3 && source({40}) == 1);
    CHECK(source({50}) == 0 && source({60, 61}) == 5 && source({70, 71}) == 0);
    grown.evidence.siblings = false;
    CHECK(source({20}) == 0 && source({10}) == 1);
}

TEST(drafts_of_random_text_keep_their_shape) {
    for (uint64_t seed = 1; seed <= 10; ++seed) {
        Random random(seed);
        Grown grown;
        grown.evidence.elsewhere = &grown.elsewhere;
        for (int i = 0; i < 12; ++i) {
            const Tokens tokens = random.tokens(60, 3);
            add(grown.own, i % 4 == 0 ? Kind::live : Kind::kept, 1, tokens);
            add(grown.elsewhere, Kind::kept, 2 + i, random.tokens(60, 3));
        }
        for (int budget : {0, 1, 16, 100}) {
            for (double floor : {1e-5, 0.02}) {
                const GrowthLimits limits{budget, floor, 32};
                check_shape(grown.grow(random.tokens(random.below(50), 3), limits), limits);
            }
        }
    }
}
