// Sequences and their n-grams: found as a plain search finds them, whatever was appended and evicted before.
#include <algorithm>
#include <stdexcept>
#include <vector>

#include "arena.h"
#include "check.h"
#include "random.h"

using paceline::Arena;
using paceline::Kind;
using paceline::Match;
using paceline::Scope;
using paceline::Sequence;
using paceline_tests::Random;

namespace {

using Tokens = std::vector<int32_t>;

const std::vector<int> kOrders = {8, 2, 1};
constexpr int kMaxMatch = 32;

// What was said, in the order in which it was said, and nothing else.
struct Plain {
    struct Said {
        Sequence* sequence;
        Tokens tokens;
        bool evicted = false;
    };
    struct Place {
        size_t said;
        size_t end;
    };
    std::vector<Said> all;
    std::vector<Place> places;

    int equal_tokens(const Place& place, const Tokens& context) const {
        const Tokens& tokens = all[place.said].tokens;
        const size_t most = std::min({place.end, context.size(), static_cast<size_t>(kMaxMatch)});
        size_t length = 0;
        while (length < most && tokens[place.end - 1 - length] == context[context.size() - 1 - length]) ++length;
        return static_cast<int>(length);
    }

    std::vector<Match> search(const Tokens& context, const Scope& scope, int most) const {
        std::vector<Match> found;
        int longer = kMaxMatch + 1;
        for (int order : kOrders) {
            if (order > static_cast<int>(context.size())) continue;
            int visits = 4 * most;
            for (size_t i = places.size(); i-- > 0;) {
                const Place& place = places[i];
                const Said& said = all[place.said];
                const int length = equal_tokens(place, context);
                if (length < order) continue;
                if (said.evicted || --visits < 0) break;
                const Sequence* sequence = said.sequence;
                const bool foreign = sequence->kind == Kind::live && sequence != scope.self;
                if (sequence->kind == Kind::dead || (foreign && !scope.siblings)) continue;
                if (scope.excluded_shard == sequence->shard) continue;
                if (place.end == said.tokens.size() || length >= longer) continue;
                found.emplace_back();
                found.back().sequence = sequence;
                found.back().end = static_cast<uint32_t>(place.end);
                found.back().next = said.tokens[place.end];
                found.back().length = length;
                if (static_cast<int>(found.size()) == most) return found;
            }
            longer = order;
        }
        return found;
    }
};

bool same(const Match& a, const Match& b) {
    return a.sequence == b.sequence && a.end == b.end && a.next == b.next && a.length == b.length;
}

void append(Arena& arena, Plain& plain, size_t index, const Tokens& tokens) {
    Plain::Said& said = plain.all[index];
    arena.append(said.sequence, tokens.data(), tokens.size());
    for (int32_t token : tokens) {
        said.tokens.push_back(token);
        plain.places.push_back({index, said.tokens.size()});
    }
}

void compare_with_a_plain_search(uint64_t seed, uint32_t alphabet) {
    Random random(seed);
    Arena arena(kOrders, kMaxMatch);
    Plain plain;
    for (int step = 0; step < 120; ++step) {
        const uint32_t what = random.below(10);
        if (what < 2 || plain.all.empty()) {
            const int64_t shard = static_cast<int64_t>(random.below(3)) - 1;
            plain.all.push_back({arena.open(Kind::live, shard, 0, 0), {}, false});
        } else if (what < 8) {
            const size_t index = random.below(static_cast<uint32_t>(plain.all.size()));
            if (!plain.all[index].evicted) append(arena, plain, index, random.tokens(random.below(60), alphabet));
        } else {
            Plain::Said& said = plain.all[random.below(static_cast<uint32_t>(plain.all.size()))];
            if (said.evicted) continue;
            if (said.sequence->kind == Kind::live) {
                said.sequence->kind = random.below(3) == 0 ? Kind::dead : Kind::kept;
            } else {
                arena.evict(said.sequence);
                said.evicted = true;
            }
        }
        Scope scope;
        scope.siblings = random.below(2) == 0;
        if (random.below(2) == 0) scope.excluded_shard = static_cast<int64_t>(random.below(3)) - 1;
        const Plain::Said& asking = plain.all[random.below(static_cast<uint32_t>(plain.all.size()))];
        if (!asking.evicted) scope.self = asking.sequence;
        Tokens context = random.tokens(random.below(12), alphabet);
        if (!asking.evicted && random.below(2) == 0) {
            context.insert(context.end(), asking.tokens.begin(), asking.tokens.end());
            context.resize(std::min<size_t>(context.size(), asking.tokens.size() / 2 + 1));
        }
        const int most = 1 + static_cast<int>(random.below(8));
        std::vector<Match> found;
        arena.search(context.data(), static_cast<int>(context.size()), scope, most, found);
        const std::vector<Match> wanted = plain.search(context, scope, most);
        CHECK(found.size() == wanted.size());
        CHECK(std::equal(found.begin(), found.end(), wanted.begin(), wanted.end(), same));
    }
    size_t tokens = 0;
    for (const Plain::Said& said : plain.all) {
        if (said.evicted) continue;
        tokens += said.tokens.size();
        Tokens copied(said.tokens.size());
        arena.copy(said.sequence, 0, static_cast<uint32_t>(copied.size()), copied.data());
        CHECK(copied == said.tokens);
    }
    CHECK(arena.tokens() == tokens);
}

}  // namespace

TEST(matches_are_those_of_a_plain_search) {
    for (uint64_t seed = 1; seed <= 20; ++seed) {
        for (uint32_t alphabet : {2u, 4u, 100u}) compare_with_a_plain_search(seed, alphabet);
    }
}

TEST(every_n_gram_is_found_while_the_tables_grow) {
    Arena arena(kOrders, kMaxMatch);
    Sequence* sequence = arena.open(Kind::kept, 0, 0, 0);
    for (int32_t token = 0; token < 3000; ++token) {
        arena.append(sequence, &token, 1);
        // Near the newest and near the oldest, where entries move over last.
        for (int32_t end : {token / 7, token - 1}) {
            if (end < 8) continue;
            Tokens context;
            for (int32_t back = 8; back >= 1; --back) context.push_back(end - back);
            std::vector<Match> found;
            arena.search(context.data(), 8, Scope(), 4, found);
            CHECK(found.size() == 1);
            CHECK(!found.empty() && found[0].next == end && found[0].length >= 8);
        }
    }
}

TEST(tokens_of_any_value_are_told_apart) {
    Arena arena(kOrders, kMaxMatch);
    const Tokens tokens = {INT32_MIN, 0, -1, INT32_MAX, 0, 1, INT32_MIN, 5};
    Sequence* sequence = arena.open(Kind::kept, 0, 0, 0);
    arena.append(sequence, tokens.data(), tokens.size());
    std::vector<Match> found;
    const Tokens context = {INT32_MAX, 0};
    arena.search(context.data(), 2, Scope(), 4, found);
    CHECK(found.size() == 2);
    CHECK(found[0].length == 2 && found[0].next == 1);
    CHECK(found[1].length == 1 && found[1].next == -1);
}

TEST(what_is_evicted_gives_its_memory_back) {
    Random random(1);
    Arena arena(kOrders, kMaxMatch);
    size_t peak = 0;
    for (int round = 0; round < 6; ++round) {
        std::vector<Sequence*> held;
        for (int i = 0; i < 20; ++i) {
            held.push_back(arena.open(Kind::kept, 0, 0, 0));
            const Tokens tokens = random.tokens(500, 50000);
            arena.append(held.back(), tokens.data(), tokens.size());
        }
        if (round == 0) peak = arena.bytes();
        CHECK(peak > 20 * 500 * (1 + kOrders.size()) * sizeof(int32_t));
        CHECK(arena.bytes() <= peak + peak / 8);
        for (Sequence* sequence : held) arena.evict(sequence);
        CHECK(arena.tokens() == 0 && arena.empty());
        CHECK(arena.bytes() < peak / 50);
    }
}

TEST(tables_keep_to_what_is_held_while_sequences_come_and_go) {
    Random random(2);
    Arena arena(kOrders, kMaxMatch);
    std::vector<Sequence*> held;
    size_t first = 0;
    for (int i = 0; i < 400; ++i) {
        if (held.size() == 40) {
            arena.evict(held.front());
            held.erase(held.begin());
        }
        held.push_back(arena.open(Kind::kept, 0, 0, 0));
        const Tokens tokens = random.tokens(200, 50000);
        arena.append(held.back(), tokens.data(), tokens.size());
        if (i == 100) first = arena.bytes();
        if (i > 100) CHECK(arena.bytes() <= first + first / 8);
    }
    while (held.size() > 4) {
        arena.evict(held.back());
        held.pop_back();
    }
    CHECK(arena.bytes() < first / 2);
    for (const Sequence* sequence : held) {
        Tokens context(8);
        arena.copy(sequence, 100, 108, context.data());
        std::vector<Match> found;
        arena.search(context.data(), 8, Scope(), 4, found);
        CHECK(found.size() == 1 && found[0].sequence == sequence && found[0].end == 108);
    }
}

TEST(numbers_of_blocks_serve_again_and_every_match_is_still_true) {
    Random random(7);
    Arena arena(kOrders, kMaxMatch, 24);
    std::vector<std::pair<Sequence*, Tokens>> held;
    size_t matches = 0;
    for (int round = 0; round < 3000; ++round) {
        if (held.size() == 6) {
            const size_t gone = random.below(6);
            arena.evict(held[gone].first);
            held.erase(held.begin() + static_cast<std::ptrdiff_t>(gone));
        }
        held.emplace_back(arena.open(Kind::kept, 0, 0, 0), Tokens());
        for (auto& [sequence, tokens] : held) {
            const Tokens fresh = random.tokens(random.below(8), 3);
            if (tokens.size() + fresh.size() > 48) continue;
            arena.append(sequence, fresh.data(), fresh.size());
            tokens.insert(tokens.end(), fresh.begin(), fresh.end());
        }
        const Tokens context = random.tokens(10, 3);
        std::vector<Match> found;
        arena.search(context.data(), 10, Scope(), 16, found);
        matches += found.size();
        for (const Match& match : found) {
            const auto owner =
                std::find_if(held.begin(), held.end(), [&](const auto& one) { return one.first == match.sequence; });
            CHECK(owner != held.end());
            const Tokens& tokens = owner->second;
            CHECK(match.end < tokens.size() && tokens[match.end] == match.next && match.length >= 1);
            for (int back = 1; back <= match.length; ++back) {
                CHECK(tokens[match.end - static_cast<size_t>(back)] == context[10 - static_cast<size_t>(back)]);
            }
        }
    }
    CHECK(matches > 3000);
    bool full = false;
    try {
        const Tokens endless(16 * 24, 1);
        arena.append(arena.open(Kind::live, 0, 0, 0), endless.data(), endless.size());
    } catch (const std::length_error&) {
        full = true;
    }
    CHECK(full);
}

TEST(orders_that_make_no_sense_are_refused) {
    const std::vector<std::vector<int>> senseless = {{}, {2, 8}, {8, 4, 3, 2, 1}, {17}, {2, 0}};
    for (const std::vector<int>& orders : senseless) {
        bool refused = false;
        try {
            Arena arena(orders, kMaxMatch);
        } catch (const std::invalid_argument&) {
            refused = true;
        }
        CHECK(refused);
    }
}
