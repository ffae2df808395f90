// What the history keeps: finished responses under the window and the caps, and what of it outlives the process.
#include <algorithm>
#include <stdexcept>

#include "history.h"

namespace paceline {

void History::open_prompt(Shard& home, const int32_t* tokens, size_t length) {
    if (home.prompt != nullptr) return;
    home.prompt = home.arena.open(Kind::prompt, home.id, 0, 0);
    home.arena.append(home.prompt, tokens, length);
}

void History::remember(Shard& home, Sequence* own, Sequence* elsewhere) {
    own->rank = ++ranks_;
    home.finished.push_back({own, own->rank});
    order_.emplace(own->rank, home.id);
    while (home.finished.size() > static_cast<size_t>(settings_.window)) evict_oldest(home);
    if (elsewhere == nullptr) return;
    elsewhere->rank = own->rank;
    elsewhere_finished_.push_back({elsewhere, own->rank});
}

void History::evict_oldest(Shard& home) {
    const size_t before = home.arena.bytes();
    order_.erase(home.finished.front().rank);
    home.arena.evict(home.finished.front().sequence);
    home.finished.pop_front();
    shard_bytes_ -= before - home.arena.bytes();
}

void History::evict_elsewhere() {
    elsewhere_.evict(elsewhere_finished_.front().sequence);
    elsewhere_finished_.pop_front();
}

// Forgets the oldest finished response of all, or what the arena over all prompts has of it; false where none is left.
bool History::evict_one() {
    const bool has_elsewhere = !elsewhere_finished_.empty();
    if (has_elsewhere && (order_.empty() || elsewhere_finished_.front().rank <= order_.begin()->first)) {
        evict_elsewhere();
        return true;
    }
    if (order_.empty()) return false;
    const auto found = shards_.find(order_.begin()->second);
    Shard& home = *found->second;
    evict_oldest(home);
    if (home.finished.empty() && home.live == 0) {
        shard_bytes_ -= home.arena.bytes();
        shards_.erase(found);
    }
    return true;
}

// Keeps under the byte cap: the oldest responses go first. False where none is left and it does not suffice.
bool History::make_room() {
    if (settings_.cap_bytes == 0) return true;
    const size_t cap = static_cast<size_t>(settings_.cap_bytes);
    while (total_bytes() > cap) {
        if (!evict_one()) return false;
    }
    return true;
}

// Keeps under both caps; where forgetting what is finished does not suffice for that on bytes, requests in flight lose
// their memory. Called whenever something was written, so that no call has much to forget.
void History::fit() {
    while (elsewhere_.tokens() > static_cast<size_t>(settings_.elsewhere_tokens) && !elsewhere_finished_.empty()) {
        evict_elsewhere();
    }
    for (auto request = live_.begin(); !make_room() && request != live_.end(); ++request) {
        if (request->second.shard != nullptr) refuse(request->second);
    }
}

void History::refuse(Live& request) {
    Shard& home = *request.shard;
    shard_bytes_ -= home.arena.bytes();
    home.arena.evict(request.own);
    if (--home.live == 0 && home.finished.empty()) {
        shards_.erase(home.id);
    } else {
        shard_bytes_ += home.arena.bytes();
    }
    if (request.elsewhere != nullptr) elsewhere_.evict(request.elsewhere);
    request = Live();
    ++refused_;
}

// What outlives the process

Records History::records() {
    std::lock_guard<std::mutex> lock(calls_);
    pool_.settle(settings_.patient);
    Records records;
    const auto add = [&records](const Shard& home, const Sequence& sequence) {
        records.shards.push_back(home.id);
        records.are_prompts.push_back(sequence.kind == Kind::prompt ? 1 : 0);
        records.versions.push_back(sequence.version);
        records.starts.push_back(sequence.start);
        const size_t before = records.tokens.size();
        records.tokens.resize(before + sequence.length);
        home.arena.copy(&sequence, 0, sequence.length, records.tokens.data() + before);
        records.offsets.push_back(static_cast<int64_t>(records.tokens.size()));
    };
    std::vector<const Shard*> homes;
    std::vector<std::pair<uint64_t, std::pair<const Shard*, const Sequence*>>> finished;
    for (const auto& [id, home] : shards_) {
        homes.push_back(home.get());
        for (const Finished& one : home->finished) {
            if (one.sequence->kind == Kind::kept) finished.push_back({one.rank, {home.get(), one.sequence}});
        }
    }
    std::sort(homes.begin(), homes.end(), [](const Shard* a, const Shard* b) { return a->id < b->id; });
    std::sort(finished.begin(), finished.end());
    for (const Shard* home : homes) add(*home, *home->prompt);
    for (const auto& [rank, one] : finished) add(*one.first, *one.second);
    return records;
}

void History::load(const Records& records) {
    std::lock_guard<std::mutex> lock(calls_);
    pool_.settle(settings_.patient);
    const size_t count = records.shards.size();
    check_offsets({records.offsets.data(), records.offsets.size()}, count, records.tokens.size());
    if (records.are_prompts.size() != count || records.versions.size() != count || records.starts.size() != count) {
        throw std::invalid_argument("records of unequal lengths");
    }
    const auto tokens = [&records](size_t i) { return records.tokens.data() + records.offsets[i]; };
    const auto length = [&records](size_t i) {
        return static_cast<size_t>(records.offsets[i + 1] - records.offsets[i]);
    };
    std::unordered_map<int64_t, size_t> prompts;
    for (size_t i = 0; i < count; ++i) {
        if (records.starts[i] < 0 || static_cast<size_t>(records.starts[i]) > length(i)) {
            throw std::invalid_argument("a record starts beyond its end");
        }
        if (records.are_prompts[i] != 0) prompts[records.shards[i]] = i;
        if (prompts.count(records.shards[i]) == 0) throw std::invalid_argument("a response came before its prompt");
    }
    for (size_t i = 0; i < count; ++i) {
        if (records.are_prompts[i] != 0) continue;  // it comes with its first response
        Shard& home = shard(records.shards[i]);
        const size_t before = home.arena.bytes(), prompt = prompts[home.id];
        open_prompt(home, tokens(prompt), length(prompt));
        const int32_t start = records.starts[i];
        Sequence* own = home.arena.open(Kind::kept, home.id, records.versions[i], start);
        home.arena.append(own, tokens(i), length(i));
        shard_bytes_ += home.arena.bytes() - before;
        Sequence* elsewhere = nullptr;
        if (settings_.elsewhere_tokens > 0) {
            const int32_t tail = std::min(start, kElsewhereAnchor);
            elsewhere = elsewhere_.open(Kind::kept, home.id, records.versions[i], tail);
            elsewhere_.append(elsewhere, tokens(i) + (start - tail), length(i) - static_cast<size_t>(start - tail));
        }
        remember(home, own, elsewhere);
        fit();
    }
}

}  // namespace paceline
