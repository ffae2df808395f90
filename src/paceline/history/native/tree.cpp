// Growing a draft: expansion of nodes, best first.
#include "tree.h"

#include <algorithm>

namespace paceline {

namespace {

// Matches are carried along a path; with fewer than this many left, the path's end is looked up anew.
constexpr size_t kFewMatches = 4;

constexpr uint8_t kSourceOfTier[kTiers] = {1, 2, 3, 5, 5};  // indices of schema.SOURCES

bool less_probable(const Leaf& a, const Leaf& b) { return a.prob < b.prob || (a.prob == b.prob && a.rank > b.rank); }

Tier tier_of(const Evidence& evidence, const Sequence& sequence, bool elsewhere) {
    if (elsewhere) return sequence.kind == Kind::live ? kElsewhereLive : kElsewhere;
    if (&sequence == evidence.self || sequence.kind == Kind::prompt) return kOwn;
    return sequence.kind == Kind::live ? kSibling : kHistory;
}

class Grower {
 public:
    Grower(const Evidence& evidence, const Votes& votes, const std::vector<int32_t>& context, int64_t position,
           const GrowthLimits& limits, Scratch& scratch, Tree& tree)
        : evidence_(evidence),
          votes_(votes),
          context_(context),
          position_(position),
          limits_(limits),
          scratch_(scratch),
          tree_(tree) {}

    void run() {
        tree_.clear();
        add({-1, -1, 0, 1.0, 0});
        expand(0);
        while (static_cast<int>(tree_.nodes.size()) <= limits_.budget && !tree_.leaves.empty()) {
            const bool found = limits_.chain ? pick_below(static_cast<int>(tree_.nodes.size()) - 1) : pick();
            if (!found) break;
            const Leaf leaf = tree_.leaves.back();
            tree_.leaves.pop_back();
            add({leaf.token, leaf.parent, tree_.nodes[leaf.parent].depth + 1, leaf.prob, leaf.source});
            expand(static_cast<int>(tree_.nodes.size()) - 1);
        }
    }

 private:
    void add(const Node& node) {
        tree_.nodes.push_back(node);
        if (scratch_.candidates.size() < tree_.nodes.size()) scratch_.candidates.emplace_back();
        scratch_.candidates[tree_.nodes.size() - 1].clear();
    }

    // Moves the most probable leaf to the end of the leaves.
    bool pick() {
        std::pop_heap(tree_.leaves.begin(), tree_.leaves.end(), less_probable);
        return true;
    }

    // The same among the children of one node; false where none is probable enough.
    bool pick_below(int parent) {
        Leaf* best = nullptr;
        for (Leaf& leaf : tree_.leaves) {
            if (leaf.parent == parent && (best == nullptr || less_probable(*best, leaf))) best = &leaf;
        }
        if (best != nullptr) std::swap(*best, tree_.leaves.back());
        return best != nullptr;
    }

    void expand(int at) {
        std::vector<Candidate>& candidates = scratch_.candidates[at];
        const uint32_t first = static_cast<uint32_t>(tree_.votes.size());
        double total = begin();
        if (at > 0) total = carry(at, candidates);
        if (candidates.size() < kFewMatches) {
            candidates.clear();
            tree_.votes.resize(first);
            look_up(at, candidates);
            total = begin();
            for (const Candidate& candidate : candidates) total += count(candidate);
        }
        Node& node = tree_.nodes[at];
        node.expanded = true;
        node.first_vote = first;
        node.last_vote = static_cast<uint32_t>(tree_.votes.size());
        for (const Support& child : scratch_.children) {
            const double prob = node.prob * votes_.calibrated(child.weight / total, child);
            if (prob < limits_.floor) continue;
            tree_.leaves.push_back({prob, leaves_++, at, child.token, kSourceOfTier[child.best.tier]});
            if (!limits_.chain) std::push_heap(tree_.leaves.begin(), tree_.leaves.end(), less_probable);
        }
    }

    // No vote has been cast yet; the weight of "none of them".
    double begin() {
        scratch_.children.clear();
        return votes_.none();
    }

    // Casts a candidate's vote and returns its weight.
    double count(const Candidate& candidate) {
        const int32_t token = *candidate.at;
        tree_.votes.push_back({token, candidate.features});
        const double weight = votes_.weight(candidate.features.length, candidate.standing);
        cast(scratch_.children, token, candidate.features, weight);
        return weight;
    }

    // The parent's matches that went on with this node's token, one token further, and the weight of their votes.
    double carry(int at, std::vector<Candidate>& candidates) {
        const int32_t token = tree_.nodes[at].token;
        const std::vector<Candidate>& before = scratch_.candidates[tree_.nodes[at].parent];
        candidates.reserve(before.size());
        double total = votes_.none();
        for (const Candidate& candidate : before) {
            if (*candidate.at != token) continue;
            const int32_t* following = arena_of(candidate).following(candidate.sequence, candidate.end, candidate.at);
            if (following == nullptr) continue;
            candidates.push_back(candidate);
            Candidate& moved = candidates.back();
            moved.at = following;
            ++moved.end;
            if (moved.features.length < kMaxLength) ++moved.features.length;
            total += count(moved);
        }
        return total;
    }

    const Arena& arena_of(const Candidate& candidate) const {
        return candidate.features.tier >= kElsewhere ? *evidence_.elsewhere : *evidence_.own;
    }

    void look_up(int at, std::vector<Candidate>& candidates) {
        std::vector<int32_t>& context = scratch_.context;
        context.assign(context_.begin(), context_.end());
        const size_t end = context.size() + static_cast<size_t>(tree_.nodes[at].depth);
        context.resize(end);
        for (int node = at, back = 1; node > 0; node = tree_.nodes[node].parent, ++back) {
            context[end - back] = tree_.nodes[node].token;
        }
        const size_t reach = std::min<size_t>(end, kMaxLength);
        const int32_t* from = context.data() + (end - reach);
        Scope scope{evidence_.self, std::nullopt, evidence_.siblings};
        vote(*evidence_.own, from, static_cast<int>(reach), scope, false, at, candidates);
        if (evidence_.elsewhere != nullptr) {
            scope = {nullptr, evidence_.shard, evidence_.siblings};
            vote(*evidence_.elsewhere, from, static_cast<int>(reach), scope, true, at, candidates);
        }
    }

    void vote(const Arena& arena, const int32_t* context, int length, const Scope& scope, bool elsewhere, int at,
              std::vector<Candidate>& candidates) {
        scratch_.matches.clear();
        arena.search(context, length, scope, limits_.matches, scratch_.matches);
        const int64_t here = position_ + tree_.nodes[at].depth;
        for (const Match& match : scratch_.matches) {
            const Tier tier = tier_of(evidence_, *match.sequence, elsewhere);
            const int64_t there = static_cast<int64_t>(match.end) - match.sequence->start;
            const int offset = tier == kOwn ? kOffsets - 1 : offset_bucket(there - here);
            candidates.emplace_back();
            Candidate& candidate = candidates.back();
            candidate.at = match.at;
            candidate.sequence = match.sequence;
            candidate.end = match.end;
            candidate.features.length = static_cast<uint8_t>(match.length);
            candidate.features.age = static_cast<uint8_t>(age_bucket(evidence_.version - match.sequence->version));
            candidate.features.tier = tier;
            candidate.features.offset = static_cast<uint8_t>(offset);
            candidate.standing = votes_.standing(candidate.features);
        }
    }

    const Evidence& evidence_;
    const Votes& votes_;
    const std::vector<int32_t>& context_;
    int64_t position_;
    const GrowthLimits& limits_;
    Scratch& scratch_;
    Tree& tree_;
    uint32_t leaves_ = 0;
};

}  // namespace

int Tree::child(int node, int32_t token) const {
    for (size_t i = static_cast<size_t>(node) + 1; i < nodes.size(); ++i) {
        if (nodes[i].parent == node && nodes[i].token == token) return static_cast<int>(i);
    }
    return -1;
}

std::vector<int32_t> Tree::path(int node) const {
    std::vector<int32_t> tokens;
    for (; node > 0; node = nodes[node].parent) tokens.push_back(nodes[node].token);
    std::reverse(tokens.begin(), tokens.end());
    return tokens;
}

void grow(const Evidence& evidence, const Votes& votes, const std::vector<int32_t>& context, int64_t position,
          const GrowthLimits& limits, Scratch& scratch, Tree& tree) {
    Grower(evidence, votes, context, position, limits, scratch, tree).run();
}

}  // namespace paceline
