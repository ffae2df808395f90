// The arena: blocks, chains and the table of n-grams.
#include "arena.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <stdexcept>

namespace paceline {

namespace {

// What an allocator keeps beside a block or a list node; counted, because the cap is on resident bytes.
constexpr size_t kAllocation = 16;

// Extends the hash of the newest k tokens by the token before them.
inline uint64_t mix(uint64_t hash, int32_t token) {
    hash = (hash ^ static_cast<uint32_t>(token)) * 0x9E3779B97F4A7C15ull;
    return hash ^ (hash >> 29);
}
constexpr uint64_t kHashSeed = 0x2545F4914F6CDD1Dull;

inline void fetch([[maybe_unused]] const void* memory) {
#if defined(__GNUC__)
    __builtin_prefetch(memory);
#endif
}

inline bool equal_pairs(const int32_t* a, const int32_t* b) {
    uint64_t left, right;
    std::memcpy(&left, a, sizeof(left));
    std::memcpy(&right, b, sizeof(right));
    return left == right;
}

}  // namespace

Arena::Arena(std::vector<int> orders, int max_match, uint32_t numbers)
    : orders_(std::move(orders)), max_match_(max_match), numbers_(numbers), grams_(orders_.size()) {
    const bool falling = std::is_sorted(orders_.rbegin(), orders_.rend());
    if (orders_.empty() || orders_.size() > kMaxOrders || !falling || orders_.back() < 1 ||
        orders_.front() > kBlockTokens || max_match < orders_.front()) {
        throw std::invalid_argument("orders must fall from at most 16 (and max_match) to at least 1");
    }
}

Arena::~Arena() {
    for (const auto& page : pages_) {
        if (page == nullptr) continue;
        for (Block* held : page->blocks) ::operator delete(held);
    }
}

Sequence* Arena::open(Kind kind, int64_t shard, int32_t version, int32_t start) {
    sequences_.emplace_back();
    Sequence* sequence = &sequences_.back();
    sequence->self = std::prev(sequences_.end());
    sequence->kind = kind;
    sequence->shard = shard;
    sequence->version = version;
    sequence->start = start;
    bytes_ += sequence_bytes(*sequence);
    return sequence;
}

size_t Arena::sequence_bytes(const Sequence& sequence) const {
    return sizeof(Sequence) + 2 * sizeof(void*) + kAllocation + sequence.blocks.capacity() * sizeof(uint32_t);
}

size_t Arena::table_bytes() const {
    size_t bytes = 0;
    for (const GramTable& table : grams_) bytes += table.bytes();
    return bytes;
}

template <class TokenBack, class Visit>
void Arena::each_gram(size_t count, const TokenBack& token_back, const Visit& visit) const {
    const int reach = static_cast<int>(std::min<size_t>(static_cast<size_t>(orders_.front()), count));
    int order = static_cast<int>(orders_.size()) - 1;
    uint64_t hash = kHashSeed;
    for (int k = 1; k <= reach; ++k) {
        hash = mix(hash, token_back(k));
        if (k != orders_[order]) continue;
        visit(order, hash);
        if (--order < 0) break;
    }
}

void Arena::append(Sequence* sequence, const int32_t* tokens, size_t count) {
    const size_t before = sequence_bytes(*sequence) + table_bytes();
    for (size_t i = 0; i < count; ++i) {
        const uint32_t offset = sequence->length % kBlockTokens;
        Block* held = offset == 0 ? allocate(sequence) : block(sequence->blocks.back());
        held->tokens[offset] = tokens[i];
        const uint32_t place = sequence->blocks.back() * kBlockTokens + offset;
        ++sequence->length;
        ++tokens_;
        for (size_t order = 0; order < orders_.size(); ++order) held->links(static_cast<int>(order))[offset] = kNoPlace;
        const auto back = [&](int k) {
            const uint32_t index = sequence->length - static_cast<uint32_t>(k);
            return index / kBlockTokens == held->index ? held->tokens[index % kBlockTokens] : token(sequence, index);
        };
        each_gram(sequence->length, back,
                  [&](int order, uint64_t hash) { held->links(order)[offset] = grams_[order].exchange(hash, place); });
    }
    bytes_ += sequence_bytes(*sequence) + table_bytes() - before;
}

Arena::Block* Arena::allocate(Sequence* sequence) {
    const uint32_t number = next_number();
    if (number / kPageBlocks == pages_.size()) {
        const size_t capacity = pages_.capacity();
        pages_.emplace_back();
        bytes_ += (pages_.capacity() - capacity) * sizeof(void*);
    }
    if (pages_[number / kPageBlocks] == nullptr) {
        pages_[number / kPageBlocks] = std::make_unique<Page>();
        bytes_ += sizeof(Page) + kAllocation;
    }
    Page& page = *pages_[number / kPageBlocks];
    Block* fresh = static_cast<Block*>(::operator new(block_bytes()));
    fresh->sequence = sequence;
    fresh->index = static_cast<uint32_t>(sequence->blocks.size());
    page.blocks[number % kPageBlocks] = fresh;
    ++page.used;
    sequence->blocks.push_back(number);
    bytes_ += block_bytes() + kAllocation;
    return fresh;
}

uint32_t Arena::next_number() {
    for (uint32_t tried = 1; tried < numbers_; ++tried) {
        const uint32_t number = next_block_;
        next_block_ = number + 1 < numbers_ ? number + 1 : 1;
        if (number / kPageBlocks >= pages_.size() || block(number) == nullptr) return number;
    }
    throw std::length_error("an arena holds as many blocks as there are numbers for them");
}

void Arena::release(uint32_t number) {
    std::unique_ptr<Page>& page = pages_[number / kPageBlocks];
    ::operator delete(page->blocks[number % kPageBlocks]);
    page->blocks[number % kPageBlocks] = nullptr;
    bytes_ -= block_bytes() + kAllocation;
    if (--page->used > 0) return;
    page.reset();
    bytes_ -= sizeof(Page) + kAllocation;
}

void Arena::forget_grams(const Sequence* sequence) {
    std::vector<int32_t> tokens(sequence->length);
    copy(sequence, 0, sequence->length, tokens.data());
    const size_t before = table_bytes();
    for (size_t end = 1; end <= tokens.size(); ++end) {
        const uint32_t index = static_cast<uint32_t>(end - 1);
        const uint32_t place = sequence->blocks[index / kBlockTokens] * kBlockTokens + index % kBlockTokens;
        const auto back = [&](int k) { return tokens[end - static_cast<size_t>(k)]; };
        each_gram(end, back, [&](int order, uint64_t hash) { grams_[order].erase(hash, place); });
    }
    bytes_ += table_bytes() - before;
}

void Arena::evict(Sequence* sequence) {
    forget_grams(sequence);
    for (uint32_t number : sequence->blocks) release(number);
    tokens_ -= sequence->length;
    bytes_ -= sequence_bytes(*sequence);
    sequences_.erase(sequence->self);
}

void Arena::copy(const Sequence* sequence, uint32_t first, uint32_t last, int32_t* out) const {
    for (uint32_t index = first; index < last; ++index) *out++ = token(sequence, index);
}

// How many tokens before `end`, which lies in `held` or at its end, equal the context's last ones.
int Arena::match_length(const Block* held, uint32_t end, const int32_t* context, int context_length) const {
    const int most = std::min({static_cast<int>(std::min<uint32_t>(end, 1u << 30)), context_length, max_match_});
    const int32_t* wanted = context + context_length;
    const int32_t* found = held->tokens + (end - 1) % kBlockTokens + 1;
    for (int length = 0;;) {
        int left = std::min(most - length, static_cast<int>(found - held->tokens));
        length += left;
        for (; left >= 2 && equal_pairs(found - 2, wanted - 2); left -= 2) {
            found -= 2;
            wanted -= 2;
        }
        if (left >= 1 && found[-1] == wanted[-1]) {
            --left;
            --wanted;
        }
        if (left > 0 || length == most) return length - left;
        held = block(held->sequence->blocks[held->index - 1]);
        found = held->tokens + kBlockTokens;
    }
}

void Arena::search(const int32_t* context, int context_length, const Scope& scope, int most,
                   std::vector<Match>& out) const {
    uint64_t hashes[kMaxOrders];
    const int count = static_cast<int>(orders_.size());
    uint64_t hash = kHashSeed;
    for (int k = 1, order = count - 1; order >= 0 && k <= context_length; ++k) {
        hash = mix(hash, context[context_length - k]);
        if (k == orders_[order]) hashes[order--] = hash;
    }
    const size_t full = out.size() + static_cast<size_t>(most);
    int longer = max_match_ + 1;
    for (int order = 0; order < count; ++order) {
        if (orders_[order] > context_length) continue;
        int visits = 4 * most;
        uint32_t place = grams_[order].find(hashes[order]);
        const Block* held = place != kNoPlace ? block(place / kBlockTokens) : nullptr;
        while (held != nullptr) {
            const Block* here = held;
            const Sequence* sequence = here->sequence;
            const uint32_t offset = place % kBlockTokens;
            const uint32_t end = here->index * kBlockTokens + offset + 1;
            if (end > sequence->length) break;  // the number of an evicted block went to this one, which is filling up
            // The next place is fetched while this one is compared.
            place = here->links(order)[offset];
            held = place != kNoPlace ? block(place / kBlockTokens) : nullptr;
            if (held != nullptr) {
                fetch(held);
                fetch(held->tokens + kBlockTokens - 1);
                fetch(held->links(order) + place % kBlockTokens);
            }
            const int length = match_length(here, end, context, context_length);
            if (length < orders_[order] || --visits < 0) break;  // another n-gram of the same fingerprint, or too many
            const bool hidden = sequence->kind == Kind::dead || sequence->shard == scope.excluded_shard ||
                                (sequence->kind == Kind::live && !scope.siblings && sequence != scope.self);
            if (hidden || end == sequence->length || length >= longer) continue;
            const Block* following = offset + 1 < kBlockTokens ? here : block(sequence->blocks[here->index + 1]);
            const int32_t* at = following->tokens + end % kBlockTokens;
            // Written in place: a copy of what was just written field by field stalls the processor.
            out.emplace_back();
            Match& match = out.back();
            match.sequence = sequence;
            match.at = at;
            match.end = end;
            match.next = *at;
            match.length = length;
            if (out.size() == full) return;
        }
        longer = orders_[order];
    }
}

}  // namespace paceline
