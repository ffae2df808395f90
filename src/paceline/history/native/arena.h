// Sequences of token ids and, for every n-gram of a few orders, the chain of places where it ended, newest first.
//
// Tokens live in blocks of 16 with the chains' links beside them: appending a token costs one table access an order,
// evicting a sequence frees its blocks at once, and nothing is ever moved. A chain ends at its first evicted place.
// One thread writes at a time and nobody reads meanwhile; any number of threads read between writes.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <list>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace paceline {

constexpr int kBlockTokens = 16;
constexpr int kMaxOrders = 4;
constexpr uint32_t kNoPlace = 0;  // block 0 is never used, so that fresh memory is an empty table

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
    Arena(std::vector<int> orders, int max_match);
    ~Arena();
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;

    Sequence* open(Kind kind, int64_t shard, int32_t version, int32_t start);
    void append(Sequence* sequence, const int32_t* tokens, size_t count);
    void evict(Sequence* sequence);

    int32_t token(const Sequence* sequence, uint32_t index) const {
        return block(sequence->blocks[index / kBlockTokens])->tokens[index % kBlockTokens];
    }
    // Moves a match on by the token that followed it; false where nothing follows any more.
    bool advance(Match& match) const {
        if (++match.end == match.sequence->length) return false;
        const uint32_t offset = match.end % kBlockTokens;
        match.at = offset != 0 ? match.at + 1 : block(match.sequence->blocks[match.end / kBlockTokens])->tokens;
        match.next = *match.at;
        return true;
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

    // From an n-gram's hash to the newest place where it ended. Grows a few entries an insertion, so that no insertion
    // waits for the whole table; places that were evicted are left behind.
    class GramTable {
     public:
        uint32_t find(uint64_t hash) const;
        // Puts `place` in front and returns the place that was there.
        uint32_t exchange(uint64_t hash, uint32_t place, const Arena& arena, size_t order_tokens);
        size_t bytes() const { return (slots_.size + old_.size) * sizeof(Slot); }

     private:
        struct Slot {
            uint32_t fingerprint;
            uint32_t place;
        };
        // Memory that the system hands out zeroed: a large table costs nothing until it is touched.
        struct Slots {
            struct Free {
                void operator()(Slot* slots) const { std::free(slots); }
            };
            std::unique_ptr<Slot[], Free> at;
            size_t size = 0;  // a power of two, or 0
            Slots() = default;
            explicit Slots(size_t count);
            Slots(Slots&& other) noexcept : at(std::move(other.at)), size(std::exchange(other.size, 0)) {}
            Slots& operator=(Slots&& other) noexcept {
                at = std::move(other.at);
                size = std::exchange(other.size, 0);
                return *this;
            }
            // The slot of the fingerprint, or the free one where it belongs; nullptr in an empty table.
            Slot* probe(uint32_t fingerprint) const;
        };
        void grow(size_t held);
        void migrate(size_t count, const Arena& arena);

        Slots slots_, old_;
        size_t used_ = 0, migrated_ = 0;
    };

    Block* block(uint32_t number) const {
        const Page* page = pages_[number / kPageBlocks].get();
        return page == nullptr ? nullptr : page->blocks[number % kPageBlocks];
    }
    bool alive(uint32_t place) const { return block(place / kBlockTokens) != nullptr; }
    Block* allocate(Sequence* sequence);
    void release(uint32_t number);
    void drop_if_empty(std::unique_ptr<Page>& page);
    int match_length(const Block* held, uint32_t end, const int32_t* context, int context_length) const;
    size_t block_bytes() const { return sizeof(Block) + orders_.size() * kBlockTokens * sizeof(uint32_t); }
    size_t sequence_bytes(const Sequence& sequence) const;

    std::vector<int> orders_;
    int max_match_;
    std::vector<std::unique_ptr<Page>> pages_;
    uint32_t next_block_ = 1;
    std::vector<GramTable> grams_;
    std::list<Sequence> sequences_;
    size_t bytes_ = 0, tokens_ = 0;
};

}  // namespace paceline
