// The batch calls: what is read to draft, and what is written when tokens were emitted.
#include "history.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace paceline {

namespace {

// Answers to the same prompt begin with this many, so that a response is found from its first token on.
constexpr int64_t kAnchor = 8;
// A loop over fewer requests than this is not worth waking a thread for.
constexpr size_t kFewRequests = 8;

void run(Pool& pool, size_t count, const Body& body) {
    if (count < kFewRequests) {
        for (size_t index = 0; index < count; ++index) body(index, 0);
    } else {
        pool.run(count, body);
    }
}

}  // namespace

void check_offsets(Span<int64_t> offsets, size_t count, size_t total) {
    bool sound = offsets.size == count + 1 && offsets.data[0] == 0;
    for (size_t i = 0; sound && i < count; ++i) sound = offsets.data[i] <= offsets.data[i + 1];
    if (!sound || static_cast<size_t>(offsets.data[count]) != total) {
        throw std::invalid_argument("offsets must rise from 0 to the number of tokens, one more than there are items");
    }
}

History::History(const Settings& settings)
    : settings_(settings), elsewhere_({8, 2}, kMaxLength), scratch_(settings.threads + 1), pool_(settings.threads) {
    if (settings.window < 1 || settings.elsewhere_tokens < 0 || settings.cap_bytes < 0 || settings.matches < 1 ||
        !(settings.floor > 0 && settings.floor < 1)) {
        throw std::invalid_argument("window and matches must be >= 1, caps >= 0 and floor in (0, 1)");
    }
}

History::Live& History::live(int64_t request) {
    const auto found = live_.find(request);
    if (found == live_.end()) throw std::invalid_argument("request " + std::to_string(request) + " is not in flight");
    return found->second;
}

std::vector<History::Live*> History::all_live(Span<int64_t> requests) {
    std::vector<Live*> batch;
    batch.reserve(requests.size);
    ++batches_;
    for (size_t i = 0; i < requests.size; ++i) {
        Live& request = live(requests.data[i]);
        if (request.batch == batches_) {
            throw std::invalid_argument("request " + std::to_string(requests.data[i]) + " comes twice in one batch");
        }
        request.batch = batches_;
        batch.push_back(&request);
    }
    return batch;
}

History::Shard& History::shard(int64_t id) {
    std::unique_ptr<Shard>& held = shards_[id];
    if (held == nullptr) held = std::make_unique<Shard>(id);
    return *held;
}

// Reading

Evidence History::evidence(const Live& live) const {
    Evidence evidence;
    evidence.own = &live.shard->arena;
    evidence.elsewhere = settings_.elsewhere_tokens > 0 ? &elsewhere_ : nullptr;
    evidence.self = live.own;
    evidence.shard = live.shard->id;
    evidence.version = version_;
    evidence.siblings = settings_.siblings;
    return evidence;
}

// The end of what a request has said, as far as matches reach.
void History::context(const Live& live, std::vector<int32_t>& tokens) const {
    const uint32_t length = live.own->length;
    const uint32_t reach = std::min<uint32_t>(length, kMaxLength);
    tokens.resize(reach);
    live.shard->arena.copy(live.own, length - reach, length, tokens.data());
}

void Drafts::add(const Tree& tree, int budget, bool is_ready) {
    const size_t count = std::min(tree.nodes.size(), static_cast<size_t>(std::max(budget, 0)) + 1);
    for (size_t i = 1; i < count; ++i) {
        tokens.push_back(tree.nodes[i].token);
        parents.push_back(tree.nodes[i].parent - 1);
        probs.push_back(static_cast<float>(tree.nodes[i].prob));
        sources.push_back(tree.nodes[i].source);
    }
    offsets.push_back(static_cast<int64_t>(tokens.size()));
    ready.push_back(is_ready ? 1 : 0);
}

Drafts History::propose(Span<int64_t> requests, int budget) {
    std::lock_guard<std::mutex> lock(calls_);
    pool_.settle(settings_.patient);
    const std::vector<Live*> batch = all_live(requests);
    const GrowthLimits limits{budget, settings_.floor, settings_.matches, settings_.chains};
    run(pool_, batch.size(), [&](size_t index, size_t thread) {
        Live& request = *batch[index];
        if (request.shard == nullptr || request.ready) return;
        const int64_t position = static_cast<int64_t>(request.own->length) - request.own->start;
        Scratch& scratch = scratch_[thread];
        context(request, scratch.said);
        grow(evidence(request), votes_, scratch.said, position, limits, scratch, request.tree);
    });
    Drafts drafts;
    for (Live* request : batch) {
        drafts.add(request->tree, budget, request->ready);
        request->ready = false;
    }
    return drafts;
}

Drafts History::propose_after(Span<int64_t> requests, Span<int32_t> tokens, Span<int64_t> offsets, int budget) {
    std::lock_guard<std::mutex> lock(calls_);
    pool_.settle(settings_.patient);
    check_offsets(offsets, requests.size, tokens.size);
    std::vector<Live*> batch;
    for (size_t i = 0; i < requests.size; ++i) batch.push_back(&live(requests.data[i]));
    const GrowthLimits limits{budget, settings_.floor, settings_.matches, settings_.chains};
    std::vector<Tree> trees(batch.size());
    run(pool_, batch.size(), [&](size_t index, size_t thread) {
        const Live& request = *batch[index];
        if (request.shard == nullptr) return;
        const int32_t* said = tokens.data + offsets.data[index];
        const int64_t count = offsets.data[index + 1] - offsets.data[index];
        const int64_t position = static_cast<int64_t>(request.own->length) - request.own->start + count;
        Scratch& scratch = scratch_[thread];
        context(request, scratch.said);
        scratch.said.insert(scratch.said.end(), said, said + count);
        grow(evidence(request), votes_, scratch.said, position, limits, scratch, trees[index]);
    });
    Drafts drafts;
    for (const Tree& tree : trees) drafts.add(tree, budget, false);
    return drafts;
}

void History::prefetch(Span<int64_t> requests, Span<int32_t> tokens, Span<int32_t> parents, Span<int64_t> offsets,
                       int outcomes, int budget) {
    std::lock_guard<std::mutex> lock(calls_);
    pool_.settle(settings_.patient);
    check_offsets(offsets, requests.size, tokens.size);
    if (parents.size != tokens.size) throw std::invalid_argument("a draft needs a parent for every token");
    const std::vector<Live*> batch = all_live(requests);
    // Which nodes of the proposed trees the pass verifies.
    std::vector<std::vector<int>> verified(batch.size());
    for (size_t i = 0; i < batch.size(); ++i) {
        verified[i].push_back(0);
        for (int64_t at = offsets.data[i]; at < offsets.data[i + 1]; ++at) {
            const int64_t parent = parents.data[at];
            const bool known = parent >= -1 && parent < at - offsets.data[i] && batch[i]->shard != nullptr;
            const int above = known ? verified[i][static_cast<size_t>(parent + 1)] : -1;
            verified[i].push_back(above < 0 ? -1 : batch[i]->tree.child(above, tokens.data[at]));
        }
    }
    pool_.start(batch.size(), [this, batch, verified, outcomes, budget](size_t index, size_t thread) {
        prepare(*batch[index], verified[index], outcomes, budget, scratch_[thread]);
    });
}

// Drafts for the likeliest (last accepted node, token after it).
void History::prepare(Live& request, const std::vector<int>& verified, int outcomes, int budget, Scratch& scratch) {
    request.prepared.clear();
    if (request.shard == nullptr) return;
    const Tree& tree = request.tree;
    std::vector<bool> is_verified(tree.nodes.size(), false);
    for (int node : verified) {
        if (node >= 0 && node < static_cast<int>(tree.nodes.size())) is_verified[node] = true;
    }
    std::vector<Leaf> candidates;
    for (const Leaf& leaf : tree.leaves) {
        if (is_verified[leaf.parent]) candidates.push_back(leaf);
    }
    for (size_t node = 1; node < tree.nodes.size(); ++node) {
        const Node& drafted = tree.nodes[node];
        if (is_verified[node] || !is_verified[drafted.parent]) continue;
        candidates.push_back({drafted.prob, 0, drafted.parent, drafted.token, drafted.source});
    }
    std::sort(candidates.begin(), candidates.end(), [](const Leaf& a, const Leaf& b) {
        if (a.prob != b.prob) return a.prob > b.prob;
        return a.parent != b.parent ? a.parent < b.parent : a.token < b.token;
    });
    if (candidates.size() > static_cast<size_t>(outcomes)) candidates.resize(outcomes);
    const GrowthLimits limits{budget, settings_.floor, settings_.matches, settings_.chains};
    std::vector<int32_t> said;
    context(request, said);
    const int64_t position = static_cast<int64_t>(request.own->length) - request.own->start;
    request.prepared.resize(candidates.size());
    for (size_t i = 0; i < candidates.size(); ++i) {
        Prepared& prepared = request.prepared[i];
        prepared.outcome = tree.path(candidates[i].parent);
        prepared.outcome.push_back(candidates[i].token);
        std::vector<int32_t> context = said;
        context.insert(context.end(), prepared.outcome.begin(), prepared.outcome.end());
        grow(evidence(request), votes_, context, position + static_cast<int64_t>(prepared.outcome.size()), limits,
             scratch, prepared.tree);
    }
}

// Writing

void History::start(Span<int64_t> requests, Span<int64_t> shards, Span<int32_t> tokens, Span<int64_t> offsets) {
    std::lock_guard<std::mutex> lock(calls_);
    pool_.settle(settings_.patient);
    check_offsets(offsets, requests.size, tokens.size);
    if (shards.size != requests.size) throw std::invalid_argument("every request needs a shard");
    for (size_t i = 0; i < requests.size; ++i) {
        if (live_.emplace(requests.data[i], Live()).second) continue;
        for (size_t added = 0; added < i; ++added) live_.erase(requests.data[added]);
        throw std::invalid_argument("request " + std::to_string(requests.data[i]) + " is in flight already");
    }
    for (size_t i = 0; i < requests.size; ++i) {
        Live& request = live_[requests.data[i]];
        const int32_t* prompt = tokens.data + offsets.data[i];
        const size_t length = static_cast<size_t>(offsets.data[i + 1] - offsets.data[i]);
        Shard& home = shard(shards.data[i]);
        const size_t before = home.arena.bytes();
        open_prompt(home, prompt, length);
        const int32_t anchor = static_cast<int32_t>(std::min<size_t>(length, kAnchor));
        const int32_t version = static_cast<int32_t>(version_);
        request.shard = &home;
        request.own = home.arena.open(Kind::live, home.id, version, anchor);
        home.arena.append(request.own, prompt + length - anchor, static_cast<size_t>(anchor));
        ++home.live;
        shard_bytes_ += home.arena.bytes() - before;
        if (settings_.elsewhere_tokens > 0) {
            const int32_t tail = std::min(anchor, kElsewhereAnchor);
            request.elsewhere = elsewhere_.open(Kind::live, home.id, version, tail);
            elsewhere_.append(request.elsewhere, prompt + length - tail, static_cast<size_t>(tail));
        }
        if (!make_room()) refuse(request);
    }
}

void History::commit(Span<int64_t> requests, Span<int32_t> tokens, Span<int64_t> offsets) {
    std::lock_guard<std::mutex> lock(calls_);
    pool_.settle(settings_.patient);
    check_offsets(offsets, requests.size, tokens.size);
    const std::vector<Live*> batch = all_live(requests);
    if (lessons_.size() < batch.size()) lessons_.resize(batch.size());
    run(pool_, batch.size(), [&](size_t index, size_t) {
        const int32_t* said = tokens.data + offsets.data[index];
        const size_t count = static_cast<size_t>(offsets.data[index + 1] - offsets.data[index]);
        Live& request = *batch[index];
        lessons_[index].clear();
        study(request, said, count, lessons_[index]);
        request.tree.clear();
        request.ready = false;
        for (Prepared& prepared : request.prepared) {
            if (prepared.outcome.size() == count && std::equal(said, said + count, prepared.outcome.begin())) {
                std::swap(request.tree, prepared.tree);
                request.ready = true;
                break;
            }
        }
        request.prepared.clear();
    });
    votes_.learn(lessons_.data(), batch.size());
    write(batch, tokens, offsets);
    fit();
}

void History::study(const Live& request, const int32_t* tokens, size_t count, Lesson& lesson) const {
    const Tree& tree = request.tree;
    int node = tree.nodes.empty() ? -1 : 0;
    for (size_t i = 0; i < count && node >= 0; ++i) {
        const Node& reached = tree.nodes[node];
        votes_.study(tree.votes.data() + reached.first_vote, reached.last_vote - reached.first_vote, tokens[i], lesson);
        node = tree.child(node, tokens[i]);
    }
}

// The arenas take what was said, each from one thread: those of the prompts, and the one over all prompts.
void History::write(const std::vector<Live*>& batch, Span<int32_t> tokens, Span<int64_t> offsets) {
    std::vector<std::pair<Shard*, std::vector<size_t>>> homes;
    std::unordered_map<Shard*, size_t> home_index;
    for (size_t i = 0; i < batch.size(); ++i) {
        if (batch[i]->shard == nullptr) continue;
        const auto [found, fresh] = home_index.emplace(batch[i]->shard, homes.size());
        if (fresh) {
            homes.emplace_back(batch[i]->shard, std::vector<size_t>());
            shard_bytes_ -= batch[i]->shard->arena.bytes();
        }
        homes[found->second].second.push_back(i);
    }
    const auto said = [&](size_t i) { return tokens.data + offsets.data[i]; };
    const auto count = [&](size_t i) { return static_cast<size_t>(offsets.data[i + 1] - offsets.data[i]); };
    const auto body = [&](size_t index, size_t) {
        if (index > 0) {
            auto& [home, members] = homes[index - 1];
            for (size_t i : members) home->arena.append(batch[i]->own, said(i), count(i));
        } else if (settings_.elsewhere_tokens > 0) {
            for (size_t i = 0; i < batch.size(); ++i) {
                if (batch[i]->shard != nullptr) elsewhere_.append(batch[i]->elsewhere, said(i), count(i));
            }
        }
    };
    if (tokens.size < 64) {
        for (size_t index = 0; index <= homes.size(); ++index) body(index, 0);
    } else {
        pool_.run(homes.size() + 1, body);
    }
    for (const auto& [home, members] : homes) shard_bytes_ += home->arena.bytes();
}

void History::finish(Span<int64_t> requests, Span<uint8_t> keep) {
    std::lock_guard<std::mutex> lock(calls_);
    pool_.settle(settings_.patient);
    if (keep.size != requests.size) throw std::invalid_argument("every request needs a word on whether to keep it");
    all_live(requests);  // refuses an unknown one before anything is written
    for (size_t i = 0; i < requests.size; ++i) {
        Live& request = live(requests.data[i]);
        if (request.shard != nullptr) {
            const Kind kind = keep.data[i] != 0 ? Kind::kept : Kind::dead;
            request.own->kind = kind;
            if (request.elsewhere != nullptr) request.elsewhere->kind = kind;
            --request.shard->live;
            remember(*request.shard, request.own, request.elsewhere);
        }
        live_.erase(requests.data[i]);
    }
    fit();
}

void History::set_version(int64_t version) {
    std::lock_guard<std::mutex> lock(calls_);
    pool_.settle(false);
    version_ = version;
    for (auto& [id, request] : live_) {
        request.ready = false;
        request.prepared.clear();
    }
}

std::vector<double> History::votes() {
    std::lock_guard<std::mutex> lock(calls_);
    return votes_.state();
}

void History::set_votes(const std::vector<double>& state) {
    std::lock_guard<std::mutex> lock(calls_);
    pool_.settle(settings_.patient);
    votes_.set_state(state);
}

size_t History::total_bytes() const { return shard_bytes_ + elsewhere_.bytes() + shards_.size() * sizeof(Shard); }

size_t History::bytes() {
    std::lock_guard<std::mutex> lock(calls_);
    return total_bytes();
}

size_t History::tokens() {
    std::lock_guard<std::mutex> lock(calls_);
    size_t total = 0;
    for (const auto& [id, home] : shards_) total += home->arena.tokens();
    return total;
}

size_t History::prompts() {
    std::lock_guard<std::mutex> lock(calls_);
    return shards_.size();
}

size_t History::refused() {
    std::lock_guard<std::mutex> lock(calls_);
    return refused_;
}

}  // namespace paceline
