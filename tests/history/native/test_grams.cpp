// The table of n-grams against a plain map, while it grows and shrinks.
#include <unordered_map>
#include <vector>

#include "check.h"
#include "grams.h"
#include "random.h"

using paceline::GramTable;
using paceline::kNoPlace;
using paceline_tests::Random;

namespace {

// Few buckets of a small table, so that gaps are closed among neighbours; distinct in the upper half, as the table
// needs.
uint64_t hash_of(uint32_t gram) { return (uint64_t{gram % 5} + (uint64_t{gram} << 10)) << 32; }

void compare_with_a_map(uint64_t seed, uint32_t grams) {
    Random random(seed);
    GramTable table;
    std::unordered_map<uint32_t, uint32_t> newest;
    std::vector<std::pair<uint32_t, uint32_t>> said;
    uint32_t place = 16;
    const auto erase = [&](size_t index) {
        const auto [gram, at] = said[index];
        table.erase(hash_of(gram), at);
        const auto held = newest.find(gram);
        if (held != newest.end() && held->second == at) newest.erase(held);
        said[index] = said.back();
        said.pop_back();
    };
    for (int step = 0; step < 3000; ++step) {
        // Times of growth and of decline; what is erased need not be the newest place.
        const bool declines = step / 400 % 2 == 1;
        if (!said.empty() && random.below(10) < (declines ? 8u : 2u)) {
            erase(random.below(static_cast<uint32_t>(said.size())));
        } else {
            const uint32_t gram = random.below(grams);
            const auto held = newest.find(gram);
            CHECK(table.exchange(hash_of(gram), place) == (held == newest.end() ? kNoPlace : held->second));
            newest[gram] = place;
            said.emplace_back(gram, place++);
        }
        const uint32_t asked = random.below(grams);
        const auto held = newest.find(asked);
        CHECK(table.find(hash_of(asked)) == (held == newest.end() ? kNoPlace : held->second));
    }
    for (uint32_t gram = 0; gram < grams; ++gram) {
        const auto held = newest.find(gram);
        CHECK(table.find(hash_of(gram)) == (held == newest.end() ? kNoPlace : held->second));
    }
    while (!said.empty()) erase(said.size() - 1);
    CHECK(table.bytes() <= 1024);
}

}  // namespace

TEST(the_newest_place_of_every_n_gram_is_that_of_a_plain_map) {
    for (uint64_t seed = 1; seed <= 10; ++seed) {
        for (uint32_t grams : {4u, 60u, 2000u, 100000u}) compare_with_a_map(seed, grams);
    }
}

TEST(an_empty_table_takes_no_memory) {
    GramTable table;
    CHECK(table.bytes() == 0 && table.find(0) == kNoPlace);
    table.erase(7, 16);
    table.exchange(7, 16);
    CHECK(table.bytes() > 0);
    table.erase(7, 16);
    CHECK(table.bytes() == 0 && table.find(7) == kNoPlace);
}

TEST(large_tables_come_from_the_system_and_go_back) {
    GramTable table;
    for (uint32_t gram = 0; gram < 100000; ++gram) table.exchange(uint64_t{gram * 2654435761u} << 32, gram + 16);
    CHECK(table.bytes() >= 100000 * 8);
    CHECK(table.find(uint64_t{5 * 2654435761u} << 32) == 21);
    for (uint32_t gram = 0; gram < 100000; ++gram) table.erase(uint64_t{gram * 2654435761u} << 32, gram + 16);
    CHECK(table.bytes() <= 1024);
}
