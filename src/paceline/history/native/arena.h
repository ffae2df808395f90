// Sequences of token ids and, for every n-gram of a few orders, the chain of places where it ended, newest first.
//
// Tokens live in blocks of 16 with the chains' links beside them: appending or evicting a token costs one table access
// an order, and nothing is ever moved. A chain ends at its first evicted place. One thread writes at a time and nobody
// reads meanwhile; any number of threads read between writes.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <list>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "grams.h"

namespace paceline {

constexpr int kBlockTokens = 16;
constexpr int kMaxOrders = 4;

enum class Kind : uint8_t { prompt, live, kept, dead };

struct Sequence {
    int64_t shard = 0;    // whose prompt it answers
    int32_t version = 0;  // of the policy that said it
    int32_t start = 0;    // how many tokens of the prompt's tail come before the response
    Kind kind = Kind::live;
    uint64_t rank = 0;  // in the order of finishing
    uint32_t length = 0;
    std::vector<uint32_t> blocks;
    std::list<Sequence>::iterator self;
};

// A place after which something is known: `next` followed the `length` tokens that equal the end of the context.
struct Match {
    const Sequence* sequence;
    const int32_t* at;  // where `next` is stored
    uint32_t end;       // index of `next` in the sequence
    int32_t next;
    int32_t length;
};

// What a search may not see.
struct Scope {
    const Sequence* self = nullptr;  // the asking request's own sequence
    std::optional<int64_t> excluded_shard;
    bool siblings = true;  // live sequences other than `self`
};

class Arena {
 public:
    // `orders` are the lengths of the indexed n-grams, longest first.
    // `numbers` is how many numbers there are for blocks; more than are held at a time.
    Arena(std::vector<int> orders, int max_match, uint32_t numbers = UINT32_MAX / kBlockTokens);
    ~Arena();
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;

    Sequence* open(Kind kind, int64_t shard, int32_t version, int32_t start);
    void append(Sequence* sequence, const int32_t* tokens, size_t count);
    void evict(Sequence* sequence);

    int32_t token(const Sequence* sequence, uint32_t index) const {
        return block(sequence->blocks[index / kBlockTokens])->tokens[index % kBlockTokens];
    }
    // Where the token after the one at `at`, which has the index `index`, is stored; nullptr at the end.
    const int32_t* following(const Sequence* sequence, uint32_t index, const int32_t* at) const {
        if (++index == sequence->length) return nullptr;
        return index % kBlockTokens != 0 ? at + 1 : block(sequence->blocks[index / kBlockTokens])->tokens;
    }
    void copy(const Sequence* sequence, uint32_t first, uint32_t last, int32_t* out) const;

    // Appends to `out` at most `most` matches of the context's end, those of the longest order first and the newest
    // first among them. Places of an order that a longer one has given already are not given again.
    void search(const int32_t* context, int context_length, const Scope& scope, int most,
                std::vector<Match>& out) const;

    size_t bytes() const { return bytes_; }
    size_t tokens() const { return tokens_; }
    bool empty() const { return sequences_.empty(); }
    const std::list<Sequence>& sequences() const { return sequences_; }

 private:
    struct Block {
        Sequence* sequence;
        uint32_t index;  // of the block in its sequence
        int32_t tokens[kBlockTokens];
        uint32_t* links(int order) { return reinterpret_cast<uint32_t*>(this + 1) + order * kBlockTokens; }
        const uint32_t* links(int order) const {
            return reinterpret_cast<const uint32_t*>(this + 1) + order * kBlockTokens;
        }
    };
    static constexpr uint32_t kPageBlocks = 64;
    struct Page {
        Block* blocks[kPageBlocks] = {};
        uint32_t used = 0;
    };

    Block* block(uint32_t number) const {
        const Page* page = pages_[number / kPageBlocks].get();
        return page == nullptr ? nullptr : page->blocks[number % kPageBlocks];
    }
    // Calls `visit(order, hash)` for each order of an n-gram that ends with the last of `count` tokens, shortest first.
    template <class TokenBack, class Visit>
    void each_gram(size_t count, const TokenBack& token_back, const Visit& visit) const;
    uint32_t next_number();
    Block* allocate(Sequence* sequence);
    void forget_grams(const Sequence* sequence);
    void release(uint32_t number);
    int match_length(const Block* held, uint32_t end, const int32_t* context, int context_length) const;
    size_t block_bytes() const { return sizeof(Block) + orders_.size() * kBlockTokens * sizeof(uint32_t); }
    size_t sequence_bytes(const Sequence& sequence) const;
    size_t table_bytes() const;

    std::vector<int> orders_;
    int max_match_;
    std::vector<std::unique_ptr<Page>> pages_;
    // Numbers are given out in turn and, after the last, from 1 on again where they are free. A link to a block whose
    // number went to another one leads to a place that is compared like any other.
    uint32_t numbers_, next_block_ = 1;  // block 0 would hold the place that is none
    std::vector<GramTable> grams_;
    std::list<Sequence> sequences_;
    size_t bytes_ = 0, tokens_ = 0;
};

}  // namespace paceline
