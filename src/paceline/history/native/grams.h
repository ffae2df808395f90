// From an n-gram's hash to the newest place where it ended.
//
// Open addressing over the hash's upper half; places are never 0. A table grows, or shrinks, a few entries a call, so
// that no call waits for the whole of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

namespace paceline {

constexpr uint32_t kNoPlace = 0;  // so that fresh memory is an empty table

// Zeroed memory. A lot of it comes straight from the system and goes straight back: a large table costs nothing until
// it is touched, and leaves no hole in the heap when it goes.
void* take_zeroed(size_t bytes);
void give_back(void* memory, size_t bytes) noexcept;

class GramTable {
 public:
    uint32_t find(uint64_t hash) const {
        const uint32_t fingerprint = static_cast<uint32_t>(hash >> 32);
        const Slot* slot = slots_.probe(fingerprint);
        return slot != nullptr && slot->place != kNoPlace ? slot->place : older(fingerprint);
    }

    // Puts `place` in front and returns the place that was there.
    uint32_t exchange(uint64_t hash, uint32_t place) {
        if ((used_ + 1) * 4 > slots_.size * 3) {
            migrate(old_.size);
            resize();
        }
        migrate(kStep);
        const uint32_t fingerprint = static_cast<uint32_t>(hash >> 32);
        Slot* slot = slots_.probe(fingerprint);
        if (slot->place != kNoPlace) return std::exchange(slot->place, place);
        ++used_;
        *slot = {fingerprint, place};
        return older(fingerprint);
    }

    // Forgets the n-gram if `place` is its newest place.
    void erase(uint64_t hash, uint32_t place) {
        migrate(4 * kStep);  // a table from which all goes has few calls left to shrink in
        const uint32_t fingerprint = static_cast<uint32_t>(hash >> 32);
        Slot* slot = slots_.probe(fingerprint);
        const bool newest = slot != nullptr && slot->place == place;
        if (newest) remove(slot);
        Slot* older = old_.probe(fingerprint);
        if (older != nullptr && older->place != kNoPlace && (newest || older->place == place)) older->place = kGone;
        if (old_.size > 0) return;
        if (used_ == 0) {
            slots_ = Slots();
        } else if (slots_.size > kFirstSlots && used_ * kStep < slots_.size) {
            resize();
        }
    }

    size_t bytes() const { return (slots_.size + old_.size) * sizeof(Slot); }

 private:
    static constexpr size_t kFirstSlots = 16;
    static constexpr size_t kStep = 8;
    static constexpr uint32_t kGone = UINT32_MAX;  // in `old_` only, where nothing may move

    struct Slot {
        uint32_t fingerprint;
        uint32_t place;
    };

    struct Slots {
        Slot* at = nullptr;
        size_t size = 0;  // a power of two, or 0

        Slots() = default;
        explicit Slots(size_t count) : at(static_cast<Slot*>(take_zeroed(count * sizeof(Slot)))), size(count) {}
        ~Slots() { give_back(at, size * sizeof(Slot)); }
        Slots(Slots&& other) noexcept : at(std::exchange(other.at, nullptr)), size(std::exchange(other.size, 0)) {}
        Slots& operator=(Slots&& other) noexcept {
            std::swap(at, other.at);
            std::swap(size, other.size);
            return *this;
        }
        // The slot of the fingerprint, or the free one where it belongs; nullptr in an empty table.
        Slot* probe(uint32_t fingerprint) const {
            if (size == 0) return nullptr;
            // The bucket comes from the fingerprint, so that entries can move without the n-gram.
            size_t index = fingerprint & (size - 1);
            while (at[index].place != kNoPlace && at[index].fingerprint != fingerprint)
                index = (index + 1) & (size - 1);
            return &at[index];
        }
    };

    uint32_t older(uint32_t fingerprint) const {
        const Slot* slot = old_.probe(fingerprint);
        return slot == nullptr || slot->place == kGone ? kNoPlace : slot->place;
    }

    // Closes the gap, so that a search may go on stopping at the first free slot.
    void remove(Slot* slot) {
        const size_t mask = slots_.size - 1;
        size_t gap = static_cast<size_t>(slot - slots_.at);
        for (size_t next = (gap + 1) & mask; slots_.at[next].place != kNoPlace; next = (next + 1) & mask) {
            const size_t home = slots_.at[next].fingerprint & mask;
            if (((next - home) & mask) < ((next - gap) & mask)) continue;
            slots_.at[gap] = slots_.at[next];
            gap = next;
        }
        slots_.at[gap] = {0, kNoPlace};
        --used_;
    }

    // Room for what is held and for what may come while the old entries move over.
    void resize() {
        size_t size = kFirstSlots;
        while (size < 2 * (used_ + slots_.size / kStep)) size *= 2;
        old_ = std::exchange(slots_, Slots(size));
        used_ = migrated_ = 0;
    }

    void migrate(size_t count) {
        if (old_.size == 0) return;
        for (; count > 0 && migrated_ < old_.size; --count, ++migrated_) {
            const Slot& moving = old_.at[migrated_];
            if (moving.place == kNoPlace || moving.place == kGone) continue;
            Slot* slot = slots_.probe(moving.fingerprint);
            if (slot->place != kNoPlace) continue;  // it has a newer place already
            *slot = moving;
            ++used_;
        }
        if (migrated_ == old_.size) old_ = Slots();
    }

    Slots slots_, old_;
    size_t used_ = 0, migrated_ = 0;
};

}  // namespace paceline
