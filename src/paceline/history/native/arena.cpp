// The arena: blocks, chains and the table of n-grams.
#include "arena.h"

#include <algorithm>
#include <new>
#include <stdexcept>

namespace paceline {

namespace {

// What an allocator keeps beside a block or a list node; counted, because the cap is on resident bytes.
constexpr size_t kAllocation = 16;
constexpr size_t kFirstSlots = 16;
constexpr size_t kMigrationStep = 8;

// Extends the hash of the newest k tokens by the token before them.
inline uint64_t mix(uint64_t hash, int32_t token) {
    hash = (hash ^ static_cast<uint32_t>(token)) * 0x9E3779B97F4A7C15ull;
    return hash ^ (hash >> 29);
}
constexpr uint64_t kHashSeed = 0x2545F4914F6CDD1Dull;

}  // namespace

Arena::Arena(std::vector<int> orders, int max_match)
    : orders_(std::move(orders)), max_match_(max_match), grams_(orders_.size()) {
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

void Arena::append(Sequence* sequence, const int32_t* tokens, size_t count) {
    const size_t before = sequence_bytes(*sequence);
    size_t tables_before = 0, tables = 0;
    for (const GramTable& table : grams_) tables_before += table.bytes();
    const int longest = orders_.front();
    for (size_t i = 0; i < count; ++i) {
        const uint32_t offset = sequence->length % kBlockTokens;
        Block* held = offset == 0 ? allocate(sequence) : block(sequence->blocks.back());
        held->tokens[offset] = tokens[i];
        const uint32_t place = sequence->blocks.back() * kBlockTokens + offset;
        ++sequence->length;
        ++tokens_;
        const int reach = static_cast<int>(std::min<uint32_t>(longest, sequence->length));
        int order = static_cast<int>(orders_.size()) - 1;
        uint64_t hash = kHashSeed;
        for (int k = 1; k <= reach; ++k) {
            const uint32_t index = sequence->length - static_cast<uint32_t>(k);
            hash = mix(hash, index / kBlockTokens == held->index ? held->tokens[index % kBlockTokens]
                                                                 : token(sequence, index));
            if (k == orders_[order]) {
                held->links(order)[offset] = grams_[order].exchange(hash, place, *this, tokens_);
                if (--order < 0) break;
            }
        }
        for (; order >= 0; --order) held->links(order)[offset] = kNoPlace;
    }
    for (const GramTable& table : grams_) tables += table.bytes();
    bytes_ += sequence_bytes(*sequence) - before + tables - tables_before;
}

Arena::Block* Arena::allocate(Sequence* sequence) {
    if (next_block_ == UINT32_MAX / kBlockTokens) throw std::length_error("an arena of 2^32 tokens is full");
    const uint32_t number = next_block_++;
    if (number / kPageBlocks == pages_.size()) {
        const size_t capacity = pages_.capacity();
        if (!pages_.empty()) drop_if_empty(pages_.back());
        pages_.push_back(std::make_unique<Page>());
        bytes_ += sizeof(Page) + kAllocation + (pages_.capacity() - capacity) * sizeof(void*);
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

void Arena::release(uint32_t number) {
    std::unique_ptr<Page>& page = pages_[number / kPageBlocks];
    ::operator delete(page->blocks[number % kPageBlocks]);
    page->blocks[number % kPageBlocks] = nullptr;
    bytes_ -= block_bytes() + kAllocation;
    --page->used;
    if (number / kPageBlocks + 1 != pages_.size()) drop_if_empty(page);  // the newest page still takes blocks
}

void Arena::drop_if_empty(std::unique_ptr<Page>& page) {
    if (page == nullptr || page->used > 0) return;
    page.reset();
    bytes_ -= sizeof(Page) + kAllocation;
}

void Arena::evict(Sequence* sequence) {
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
    int length = 0;
    int run = static_cast<int>((end - 1) % kBlockTokens) + 1;  // tokens of the block that lie before `end`
    while (true) {
        const int32_t* held_end = held->tokens + run;
        const int stop = std::min(most, length + run);
        const int32_t* wanted_end = wanted - length;
        const int first = length;
        while (length < stop && held_end[first - length - 1] == wanted_end[first - length - 1]) ++length;
        if (length < stop || length == most) return length;
        held = block(held->sequence->blocks[held->index - 1]);
        run = kBlockTokens;
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
        for (uint32_t place = grams_[order].find(hashes[order]); place != kNoPlace;) {
            const Block* held = block(place / kBlockTokens);
            if (held == nullptr) break;
            const Sequence* sequence = held->sequence;
            const uint32_t end = held->index * kBlockTokens + place % kBlockTokens + 1;
            const int length = match_length(held, end, context, context_length);
            if (length < orders_[order] || --visits < 0) break;  // another n-gram of the same fingerprint, or too many
            const uint32_t offset = place % kBlockTokens;
            place = held->links(order)[offset];
            const bool hidden = sequence->kind == Kind::dead || sequence->shard == scope.excluded_shard ||
                                (sequence->kind == Kind::live && !scope.siblings && sequence != scope.self);
            if (hidden || end == sequence->length || length >= longer) continue;
            const Block* following = offset + 1 < kBlockTokens ? held : block(sequence->blocks[held->index + 1]);
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

// The table

Arena::GramTable::Slots::Slots(size_t count) : at(static_cast<Slot*>(std::calloc(count, sizeof(Slot)))), size(count) {
    if (at == nullptr) throw std::bad_alloc();
}

Arena::GramTable::Slot* Arena::GramTable::Slots::probe(uint32_t fingerprint) const {
    if (size == 0) return nullptr;
    // The bucket comes from the fingerprint, so that a table can grow from what its slots hold.
    size_t index = fingerprint & (size - 1);
    while (at[index].place != kNoPlace && at[index].fingerprint != fingerprint) index = (index + 1) & (size - 1);
    return &at[index];
}

uint32_t Arena::GramTable::find(uint64_t hash) const {
    const uint32_t fingerprint = static_cast<uint32_t>(hash >> 32);
    const Slot* slot = slots_.probe(fingerprint);
    if (slot != nullptr && slot->place != kNoPlace) return slot->place;
    slot = old_.probe(fingerprint);
    return slot == nullptr ? kNoPlace : slot->place;
}

uint32_t Arena::GramTable::exchange(uint64_t hash, uint32_t place, const Arena& arena, size_t order_tokens) {
    if ((used_ + 1) * 4 > slots_.size * 3) {
        migrate(old_.size, arena);
        grow(order_tokens);
    }
    migrate(kMigrationStep, arena);
    const uint32_t fingerprint = static_cast<uint32_t>(hash >> 32);
    Slot* slot = slots_.probe(fingerprint);
    if (slot->place != kNoPlace) return std::exchange(slot->place, place);
    ++used_;
    *slot = {fingerprint, place};
    const Slot* older = old_.probe(fingerprint);
    return older == nullptr ? kNoPlace : older->place;
}

// Room for what is held and for what may come while the old entries move over.
void Arena::GramTable::grow(size_t held) {
    const size_t kept = std::min(used_, held);
    size_t size = kFirstSlots;
    while (size < 2 * (kept + slots_.size / kMigrationStep + 1)) size *= 2;
    old_ = std::move(slots_);
    slots_ = Slots(size);
    used_ = migrated_ = 0;
}

void Arena::GramTable::migrate(size_t count, const Arena& arena) {
    if (old_.size == 0) return;
    for (; count > 0 && migrated_ < old_.size; --count, ++migrated_) {
        const Slot& moving = old_.at[migrated_];
        if (moving.place == kNoPlace || !arena.alive(moving.place)) continue;
        Slot* slot = slots_.probe(moving.fingerprint);
        if (slot->place != kNoPlace) continue;  // it has a newer place already
        *slot = moving;
        ++used_;
    }
    if (migrated_ == old_.size) old_ = Slots();
}

}  // namespace paceline
