// Grows a draft: the most probable continuations of a context, best first, by the votes of its matches.
#pragma once

#include <cstdint>
#include <vector>

#include "arena.h"
#include "votes.h"

namespace paceline {

struct Node {
    int32_t token;
    int32_t parent;  // index of a node; 0 is the root, the end of the context
    int32_t depth;
    double prob;  // of being reached and accepted
    uint8_t source;
    uint32_t first_vote = 0, last_vote = 0;
    bool expanded = false;
};

// A child that was not drafted.
struct Leaf {
    double prob;
    uint32_t rank;  // in the order of discovery; the earlier wins a tie
    int32_t parent, token;
    uint8_t source;
};

struct Tree {
    std::vector<Node> nodes;
    std::vector<Vote> votes;
    std::vector<Leaf> leaves;  // a heap, the most probable on top; in a chain in no order

    void clear() {
        nodes.clear();
        votes.clear();
        leaves.clear();
    }
    int child(int node, int32_t token) const;  // -1 where it has none
    std::vector<int32_t> path(int node) const;
};

// What a context is matched against.
struct Evidence {
    const Arena* own = nullptr;        // answers to the same prompt, live ones among them
    const Arena* elsewhere = nullptr;  // answers to other prompts; nullptr: none
    const Sequence* self = nullptr;    // the request's own sequence in `own`
    int64_t shard = 0;
    int64_t version = 0;
    bool siblings = true;
};

struct GrowthLimits {
    int budget = 16;       // nodes
    double floor = 0.002;  // least probability of a node
    int matches = 32;      // the most that vote, own and elsewhere each
    bool chain = false;    // after each node only its most probable child
};

// A match on its way down a path.
struct Candidate {
    const int32_t* at;  // where the token that followed is stored
    const Sequence* sequence;
    double standing;  // see Votes
    uint32_t end;     // index of that token in the sequence
    Features features;
};

// Memory that growing needs, kept between calls.
struct Scratch {
    std::vector<std::vector<Candidate>> candidates;  // by node
    std::vector<int32_t> said;                       // for callers: the context of a request
    std::vector<Match> matches;
    std::vector<Support> children;
    std::vector<int32_t> context;
};

// `context` is the end of what was said (at most kMaxLength tokens count); `position` tokens of the response are in it.
void grow(const Evidence& evidence, const Votes& votes, const std::vector<int32_t>& context, int64_t position,
          const GrowthLimits& limits, Scratch& scratch, Tree& tree);

}  // namespace paceline
