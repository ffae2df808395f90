// Python bindings of the native history index: flat numpy arrays in and out, the GIL released.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <utility>

#include "history.h"
#include "version.h"

namespace nb = nanobind;
using paceline::Drafts;
using paceline::History;
using paceline::Records;
using paceline::Settings;
using paceline::Span;

namespace {

template <class T>
using In = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using Out = nb::ndarray<nb::numpy, T, nb::ndim<1>>;

template <class T>
Span<T> span(const In<T>& array) {
    return {array.data(), array.size()};
}

// A numpy array of what the owner holds.
template <class T>
Out<T> array(std::vector<T>& values, const nb::capsule& owner) {
    return Out<T>(values.data(), {values.size()}, owner);
}

template <class T>
nb::capsule own(T* held) {
    return nb::capsule(held, [](void* pointer) noexcept { delete static_cast<T*>(pointer); });
}

template <class T>
std::vector<T> vector(const In<T>& values) {
    return std::vector<T>(values.data(), values.data() + values.size());
}

// What `call` drafts.
template <class Call>
nb::tuple drafted(const Call& call) {
    auto* held = new Drafts;
    const nb::capsule owner = own(held);
    {
        nb::gil_scoped_release unlocked;
        *held = call();
    }
    return nb::make_tuple(array(held->tokens, owner), array(held->parents, owner), array(held->probs, owner),
                          array(held->sources, owner), array(held->offsets, owner), array(held->ready, owner));
}

nb::tuple records(History& history) {
    auto* held = new Records;
    const nb::capsule owner = own(held);
    {
        nb::gil_scoped_release unlocked;
        *held = history.records();
    }
    return nb::make_tuple(array(held->shards, owner), array(held->are_prompts, owner), array(held->versions, owner),
                          array(held->starts, owner), array(held->offsets, owner), array(held->tokens, owner));
}

void load(History& history, const In<int64_t>& shards, const In<uint8_t>& are_prompts, const In<int32_t>& versions,
          const In<int32_t>& starts, const In<int64_t>& offsets, const In<int32_t>& tokens) {
    const Records held{vector(shards), vector(are_prompts), vector(versions),
                       vector(starts), vector(tokens),      vector(offsets)};
    nb::gil_scoped_release unlocked;
    history.load(held);
}

}  // namespace

NB_MODULE(_native, module) {
    // A history that is alive when Python ends is no leak worth three screens of text.
    nb::set_leak_warnings(false);
    module.doc() = "The history index in C++.";
    module.def("version", &paceline::version, "The version of paceline that this extension was built from.");
    const auto unlocked = nb::call_guard<nb::gil_scoped_release>();
    nb::class_<History>(module, "History")
        .def(
            "__init__",
            [](History* self, int64_t window, int64_t elsewhere_tokens, int64_t cap_bytes, bool siblings, double floor,
               int matches, size_t threads, bool patient, bool chains) {
                Settings settings;
                settings.window = window;
                settings.elsewhere_tokens = elsewhere_tokens;
                settings.cap_bytes = cap_bytes;
                settings.siblings = siblings;
                settings.floor = floor;
                settings.matches = matches;
                settings.threads = threads;
                settings.patient = patient;
                settings.chains = chains;
                new (self) History(settings);
            },
            nb::arg("window"), nb::arg("elsewhere_tokens"), nb::arg("cap_bytes"), nb::arg("siblings"), nb::arg("floor"),
            nb::arg("matches"), nb::arg("threads"), nb::arg("patient"), nb::arg("chains"))
        .def(
            "start_batch",
            [](History& self, const In<int64_t>& requests, const In<int64_t>& shards, const In<int32_t>& tokens,
               const In<int64_t>& offsets) { self.start(span(requests), span(shards), span(tokens), span(offsets)); },
            unlocked)
        .def("propose_batch", [](History& self, const In<int64_t>& requests,
                                 int budget) { return drafted([&] { return self.propose(span(requests), budget); }); })
        .def(
            "propose_after_batch",
            [](History& self, const In<int64_t>& requests, const In<int32_t>& tokens, const In<int64_t>& offsets,
               int budget) {
                return drafted([&] { return self.propose_after(span(requests), span(tokens), span(offsets), budget); });
            })
        .def(
            "prefetch_batch",
            [](History& self, const In<int64_t>& requests, const In<int32_t>& tokens, const In<int32_t>& parents,
               const In<int64_t>& offsets, int outcomes, int budget) {
                self.prefetch(span(requests), span(tokens), span(parents), span(offsets), outcomes, budget);
            },
            unlocked)
        .def(
            "commit_batch",
            [](History& self, const In<int64_t>& requests, const In<int32_t>& tokens, const In<int64_t>& offsets) {
                self.commit(span(requests), span(tokens), span(offsets));
            },
            unlocked)
        .def(
            "finish_batch",
            [](History& self, const In<int64_t>& requests, const In<uint8_t>& keep) {
                self.finish(span(requests), span(keep));
            },
            unlocked)
        .def("set_version", &History::set_version, unlocked)
        .def("records", &records)
        .def("load", &load)
        .def("votes", &History::votes, unlocked)
        .def("set_votes", &History::set_votes, unlocked)
        .def_prop_ro("nbytes", &History::bytes, unlocked)
        .def_prop_ro("tokens", &History::tokens, unlocked)
        .def_prop_ro("prompts", &History::prompts, unlocked)
        .def_prop_ro("refused", &History::refused, unlocked);
}
