// The history of a run behind one batch interface: an arena per prompt, one over all prompts, and the requests in
// flight.
//
// Calls alternate between reading (propose, prefetch) and writing (start, commit, finish). While the arenas are read
// nobody writes, so readers take no locks; while they are written each has one writer.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "arena.h"
#include "pool.h"
#include "tree.h"
#include "votes.h"

namespace paceline {

struct Settings {
    int64_t window = 64;           // finished responses kept a prompt
    int64_t elsewhere_tokens = 0;  // most tokens kept of all prompts' responses; 0: no such arena
    int64_t cap_bytes = 0;         // of all arenas; 0: no cap
    bool siblings = true;
    double floor = 0.002;
    int matches = 32;
    size_t threads = 0;    // beside the caller's
    bool chains = false;   // draft chains, not trees
    bool patient = false;  // wait for prefetched drafts that are not ready: repeatable, and never faster
};

// Drafts of a batch end to end: draft i is nodes offsets[i] .. offsets[i+1].
struct Drafts {
    std::vector<int32_t> tokens, parents;
    std::vector<float> probs;
    std::vector<uint8_t> sources;
    std::vector<int64_t> offsets{0};
    std::vector<uint8_t> ready;
    void add(const Tree& tree, int budget, bool is_ready);
};

// Sequences end to end: prompts first, then finished responses, oldest first.
struct Records {
    std::vector<int64_t> shards;
    std::vector<uint8_t> are_prompts;
    std::vector<int32_t> versions, starts, tokens;
    std::vector<int64_t> offsets{0};
};

template <class T>
struct Span {
    const T* data;
    size_t size;
};

// Throws std::invalid_argument unless `offsets` cut `total` tokens into `count` items.
void check_offsets(Span<int64_t> offsets, size_t count, size_t total);

// Answers to other prompts begin with this many tokens of their own prompt.
constexpr int32_t kElsewhereAnchor = 2;

class History {
 public:
    explicit History(const Settings& settings);

    // `tokens` of request i are tokens[offsets[i]] .. tokens[offsets[i+1]], here and below.
    void start(Span<int64_t> requests, Span<int64_t> shards, Span<int32_t> tokens, Span<int64_t> offsets);
    Drafts propose(Span<int64_t> requests, int budget);
    // What would be drafted had request i said its tokens too. Nothing is remembered of it; a request may come twice.
    Drafts propose_after(Span<int64_t> requests, Span<int32_t> tokens, Span<int64_t> offsets, int budget);
    // Prepares drafts for the `outcomes` likeliest outcomes of a pass over these drafts, in the background.
    void prefetch(Span<int64_t> requests, Span<int32_t> tokens, Span<int32_t> parents, Span<int64_t> offsets,
                  int outcomes, int budget);
    void commit(Span<int64_t> requests, Span<int32_t> tokens, Span<int64_t> offsets);
    void finish(Span<int64_t> requests, Span<uint8_t> keep);
    void set_version(int64_t version);

    Records records();
    void load(const Records& records);
    std::vector<double> votes();
    void set_votes(const std::vector<double>& state);

    size_t bytes();
    size_t tokens();
    size_t prompts();
    size_t refused();  // requests that the byte cap left without a memory

 private:
    struct Finished {
        Sequence* sequence;
        uint64_t rank;
    };
    struct Shard {
        explicit Shard(int64_t id_) : id(id_), arena({8, 2, 1}, kMaxLength) {}
        int64_t id;
        Arena arena;
        Sequence* prompt = nullptr;
        std::deque<Finished> finished;
        size_t live = 0;
    };
    struct Prepared {
        std::vector<int32_t> outcome;
        Tree tree;
    };
    struct Live {
        Shard* shard = nullptr;  // nullptr: refused
        Sequence* own = nullptr;
        Sequence* elsewhere = nullptr;
        Tree tree;
        bool ready = false;
        uint64_t batch = 0;  // the last one that it was in
        std::vector<Prepared> prepared;
    };

    Live& live(int64_t request);
    Shard& shard(int64_t id);
    static void open_prompt(Shard& home, const int32_t* tokens, size_t length);
    std::vector<Live*> all_live(Span<int64_t> requests);
    Evidence evidence(const Live& live) const;
    void context(const Live& live, std::vector<int32_t>& tokens) const;
    void prepare(Live& live, const std::vector<int>& verified, int outcomes, int budget, Scratch& scratch);
    void study(const Live& live, const int32_t* tokens, size_t count, Lesson& lesson) const;
    void write(const std::vector<Live*>& batch, Span<int32_t> tokens, Span<int64_t> offsets);
    void refuse(Live& live);
    void remember(Shard& shard, Sequence* own, Sequence* elsewhere);
    void evict_oldest(Shard& shard);
    void evict_elsewhere();
    bool evict_one();
    bool make_room();
    void fit();
    size_t total_bytes() const;

    Settings settings_;
    std::mutex calls_;
    Votes votes_;
    std::unordered_map<int64_t, std::unique_ptr<Shard>> shards_;
    Arena elsewhere_;
    std::deque<Finished> elsewhere_finished_;
    std::map<uint64_t, int64_t> order_;  // the shard of every finished response by its rank
    std::unordered_map<int64_t, Live> live_;
    int64_t version_ = 0;
    uint64_t ranks_ = 0;
    uint64_t batches_ = 0;
    size_t shard_bytes_ = 0;
    size_t refused_ = 0;
    std::vector<Scratch> scratch_;
    std::vector<Lesson> lessons_;
    Pool pool_;  // last, so that its threads end first
};

}  // namespace paceline
