// The whole history: the same drafts with any number of threads, and calls that run beside what is being prepared.
#include <algorithm>
#include <atomic>
#include <functional>
#include <stdexcept>
#include <thread>
#include <vector>

#include "check.h"
#include "history.h"
#include "random.h"

using paceline::Drafts;
using paceline::History;
using paceline::Records;
using paceline::Settings;
using paceline::Span;
using paceline_tests::Random;

namespace {

using Tokens = std::vector<int32_t>;
using Numbers = std::vector<int64_t>;

template <class T>
Span<T> span(const std::vector<T>& values) {
    return {values.data(), values.size()};
}

// Token lists end to end.
struct Flat {
    Tokens tokens;
    Numbers offsets{0};
    void add(const Tokens& part) {
        tokens.insert(tokens.end(), part.begin(), part.end());
        offsets.push_back(static_cast<int64_t>(tokens.size()));
    }
};

Settings settings(size_t threads, bool patient) {
    Settings settings;
    settings.window = 4;
    settings.elsewhere_tokens = 2000;
    settings.threads = threads;
    settings.patient = patient;
    return settings;
}

// A run in which responses repeat one another with changes; it looks at drafts, so both runs must agree to go on.
struct Run {
    static constexpr int64_t kRows = 24, kVerified = 5;
    History history;
    Random random{7};
    std::vector<Tokens> texts;
    Numbers requests;
    int64_t started = 0;
    Drafts drafts;

    explicit Run(const Settings& options) : history(options) {
        for (int i = 0; i < 6; ++i) texts.push_back(random.tokens(40, 50));
    }

    void start() {
        Numbers fresh, shards;
        Flat prompts;
        while (static_cast<int64_t>(requests.size()) < kRows) {
            fresh.push_back(started);
            requests.push_back(started);
            shards.push_back(started % 5);
            prompts.add({static_cast<int32_t>(started % 5), 1, 2});
            ++started;
        }
        history.start(span(fresh), span(shards), span(prompts.tokens), span(prompts.offsets));
    }

    void propose() { drafts = history.propose(span(requests), 12); }

    // Of every draft, the pass verifies the first few nodes.
    int64_t verified(size_t row) const { return std::min(drafts.offsets[row + 1], drafts.offsets[row] + kVerified); }

    void prefetch() {
        Flat tokens, parents;
        for (size_t row = 0; row < requests.size(); ++row) {
            const int64_t first = drafts.offsets[row], last = verified(row);
            tokens.add({drafts.tokens.begin() + first, drafts.tokens.begin() + last});
            parents.add({drafts.parents.begin() + first, drafts.parents.begin() + last});
        }
        history.prefetch(span(requests), span(tokens.tokens), span(parents.tokens), span(tokens.offsets), 8, 12);
    }

    // Mostly what was drafted, until a node that the pass does not verify; else a piece of a text.
    void commit() {
        Flat said;
        for (size_t row = 0; row < requests.size(); ++row) {
            Tokens tokens;
            const int64_t first = drafts.offsets[row];
            int64_t at = -1;
            for (int64_t node = first; node < drafts.offsets[row + 1] && at < kVerified; ++node) {
                if (drafts.parents[node] != at || random.below(10) == 0) continue;
                tokens.push_back(drafts.tokens[node]);
                at = node - first;
            }
            if (at < kVerified) {
                const auto from = texts[random.below(6)].begin() + random.below(30);
                tokens.insert(tokens.end(), from, from + 1 + random.below(4));
            }
            said.add(tokens);
        }
        history.commit(span(requests), span(said.tokens), span(said.offsets));
    }

    void finish() {
        Numbers done;
        std::vector<uint8_t> keep;
        for (int64_t request : requests) {
            if (random.below(4) > 0) continue;
            done.push_back(request);
            keep.push_back(random.below(5) > 0);
        }
        history.finish(span(done), span(keep));
        for (int64_t request : done) requests.erase(std::find(requests.begin(), requests.end(), request));
    }
};

bool equal(const Drafts& a, const Drafts& b) {
    return a.tokens == b.tokens && a.parents == b.parents && a.probs == b.probs && a.sources == b.sources &&
           a.offsets == b.offsets && a.ready == b.ready;
}

bool equal(const Records& a, const Records& b) {
    return a.shards == b.shards && a.are_prompts == b.are_prompts && a.versions == b.versions && a.starts == b.starts &&
           a.offsets == b.offsets && a.tokens == b.tokens;
}

bool refused(const std::function<void()>& call) {
    try {
        call();
    } catch (const std::invalid_argument&) {
        return true;
    }
    return false;
}

}  // namespace

TEST(what_is_supposed_is_drafted_by_any_number_of_threads_and_changes_nothing) {
    Run alone(settings(0, true)), together(settings(3, true)), unasked(settings(0, true));
    size_t drafted = 0;
    for (int step = 0; step < 12; ++step) {
        for (Run* run : {&alone, &together, &unasked}) {
            run->start();
            run->propose();
        }
        CHECK(equal(alone.drafts, unasked.drafts));
        Numbers asked;
        Flat supposed;
        for (size_t row = 0; row < alone.requests.size(); ++row) {
            for (int64_t node = alone.drafts.offsets[row]; node < alone.verified(row); ++node) {
                asked.push_back(alone.requests[row]);
                supposed.add({alone.drafts.tokens[node], static_cast<int32_t>(step)});
            }
        }
        const Drafts one = alone.history.propose_after(span(asked), span(supposed.tokens), span(supposed.offsets), 8);
        CHECK(
            equal(one, together.history.propose_after(span(asked), span(supposed.tokens), span(supposed.offsets), 8)));
        drafted += one.tokens.size();
        for (Run* run : {&alone, &together, &unasked}) {
            run->commit();
            run->finish();
        }
    }
    CHECK(drafted > 100);
    CHECK(alone.history.votes() == unasked.history.votes());
}

TEST(any_number_of_threads_drafts_the_same) {
    Run alone(settings(0, true)), together(settings(3, true));
    size_t drafted = 0, ready = 0;
    for (int step = 0; step < 30; ++step) {
        for (Run* run : {&alone, &together}) {
            if (step % 10 == 0) run->history.set_version(step);
            run->start();
            run->propose();
        }
        CHECK(equal(alone.drafts, together.drafts));
        drafted += alone.drafts.tokens.size();
        ready += static_cast<size_t>(std::count(alone.drafts.ready.begin(), alone.drafts.ready.end(), 1));
        for (Run* run : {&alone, &together}) {
            run->prefetch();
            run->commit();
            if (step % 3 == 2) run->finish();
        }
    }
    CHECK(drafted > 1000);
    CHECK(ready > 10);
    CHECK(alone.history.votes() == together.history.votes());
    CHECK(equal(alone.history.records(), together.history.records()));
    CHECK(alone.history.bytes() == together.history.bytes());
}

TEST(calls_that_write_wait_for_what_is_being_prepared) {
    Run run(settings(3, false));
    for (int step = 0; step < 40; ++step) {
        run.start();
        run.propose();
        run.prefetch();
        switch (step % 8) {  // each right behind a prefetch
            case 0:
                break;
            case 1:
                run.finish();
                break;
            case 2:
                run.start();
                break;
            case 3:
                run.history.set_version(step);
                break;
            case 4:
                run.history.load(run.history.records());
                break;
            case 5:
                run.history.set_votes(run.history.votes());
                break;
            case 6:
                run.prefetch();
                break;
            default:
                CHECK(run.history.tokens() > 0 && run.history.bytes() > 0);
        }
        run.propose();
        run.prefetch();
        run.commit();
    }
    run.prefetch();  // goes on while the history ends
}

TEST(calls_from_several_threads_come_one_after_another) {
    Run run(settings(2, false));
    run.start();
    std::atomic<bool> over{false};
    std::thread reader([&] {
        while (!over) {
            CHECK(run.history.prompts() == 5);
            run.history.records();
            run.history.votes();
        }
    });
    for (int step = 0; step < 10; ++step) {
        run.propose();
        run.prefetch();
        run.commit();
    }
    over = true;
    reader.join();
}

TEST(records_come_back_equal) {
    Run run(settings(0, true));
    for (int step = 0; step < 12; ++step) {
        run.start();
        run.propose();
        run.commit();
        run.finish();
    }
    Run other(settings(0, true));
    other.history.load(run.history.records());
    const Records first = run.history.records(), second = other.history.records();
    CHECK(equal(first, second));
    CHECK(first.shards.size() > 5);
    CHECK(other.history.prompts() == run.history.prompts());
}

TEST(the_byte_cap_holds_whatever_comes) {
    Settings options = settings(1, true);
    options.window = 1000;
    options.elsewhere_tokens = 1 << 20;
    options.cap_bytes = 200000;
    Run run(options);
    for (int step = 0; step < 60; ++step) {
        run.start();
        run.propose();
        run.commit();
        run.finish();
        CHECK(run.history.bytes() <= 200000);
    }
    CHECK(run.history.tokens() > 0);
    // One prompt that is larger than the cap: its request goes without a memory.
    const size_t refused_before = run.history.refused();
    Flat prompt;
    prompt.add(Tokens(50000, 3));
    const Numbers request{-1}, shard{99};
    run.history.start(span(request), span(shard), span(prompt.tokens), span(prompt.offsets));
    CHECK(run.history.refused() > refused_before);
    CHECK(run.history.bytes() <= 200000);
    const std::vector<uint8_t> keep{1};
    run.history.finish(span(request), span(keep));
}

TEST(what_does_not_fit_together_is_refused_and_changes_nothing) {
    Run run(settings(0, true));
    run.start();
    run.propose();
    const Drafts before = run.drafts;
    const Numbers unknown{run.requests[0], 1000}, twice{run.requests[0], run.requests[0]};
    Flat said;
    said.add({1});
    said.add({2});
    const std::vector<uint8_t> keep{1, 1};
    for (const Numbers& requests : {unknown, twice}) {
        CHECK(refused([&] { run.history.propose(span(requests), 4); }));
        CHECK(refused([&] { run.history.commit(span(requests), span(said.tokens), span(said.offsets)); }));
        CHECK(refused([&] { run.history.finish(span(requests), span(keep)); }));
    }
    const Numbers fresh{500, 500}, shards{1, 1};
    CHECK(refused([&] { run.history.start(span(fresh), span(shards), span(said.tokens), span(said.offsets)); }));
    const Numbers falling{0, 2, 1};
    const Numbers two{run.requests[0], run.requests[1]};
    CHECK(refused([&] { run.history.commit(span(two), span(said.tokens), span(falling)); }));
    Records records;
    records.shards = {1};
    CHECK(refused([&] { run.history.load(records); }));
    run.propose();
    CHECK(equal(run.drafts, before));
}
