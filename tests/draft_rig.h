// Sequences for the sequential engine with drafts: made from prompts, run to their end, and looked
// at down to the bytes they store.
#pragma once

#include <doctest/doctest.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "runtime/draft_oracle.h"
#include "runtime/tokenizer.h"

namespace colibri {

struct DraftLine {
  std::vector<int32_t> prompt;
  int32_t max_tokens = 16;
  float temperature = 0;
  std::vector<std::string> stop = {};
};

// Sequences as the scheduler admits them, with the store that holds them all.
struct DraftRig {
  DraftRig(const Model& the_model, const Tokenizer& tokenizer, const std::vector<DraftLine>& lines,
           KvType type, int32_t page_tokens = 4)
      : model(the_model),
        mask(std::vector<uint8_t>(static_cast<size_t>(the_model.Config().vocab), 1)),
        stop_ids(the_model.Config().stop_ids),
        kv(KvShapeOf(the_model, page_tokens, type), PagesFor(lines, page_tokens)) {
    for (const DraftLine& line : lines) {
      table.push_back(std::make_unique<Sequence>());
      Sequence& s = *table.back();
      s.index = static_cast<uint32_t>(table.size() - 1);
      s.line = std::make_shared<LineState>();
      s.line->request.custom_id = "line-" + std::to_string(s.index);
      s.line->request.sampling.temperature = line.temperature;
      s.line->request.stop = line.stop;
      s.tokens = line.prompt;
      s.prompt = static_cast<int32_t>(line.prompt.size());
      s.stop.emplace(tokenizer, stop_ids, s.line->request, line.max_tokens);
      sequences.push_back(&s);
    }
  }

  static int32_t PagesFor(const std::vector<DraftLine>& lines, int32_t page_tokens) {
    int32_t pages = 0;
    for (const DraftLine& line : lines) {
      const auto tokens = static_cast<int32_t>(line.prompt.size()) + line.max_tokens + kMaxDrafts;
      pages += tokens / page_tokens + 1;
    }
    return pages;
  }

  void Run(const DraftOracleOptions& options, const std::vector<uint32_t>& failing = {}) {
    DraftOracle oracle(model, kv, mask, options);
    oracle.Engine().FailItems(failing);
    oracle.Run(sequences);
  }

  // What the first `count` positions of a sequence have in the caches of layers [first, last).
  std::string Stored(const Sequence& s, int32_t count, int32_t first, int32_t last) const {
    const KvShape& shape = kv.Shape();
    const uint64_t value = KvBytes(shape.type);
    std::string bytes;
    const auto add = [&bytes](const std::byte* from, uint64_t n) {
      bytes.append(reinterpret_cast<const char*>(from), n);
    };
    for (int32_t layer = first; layer < last; ++layer) {
      for (int32_t p = 0; p < count; ++p) {
        add(kv.LatentAt(layer, s.pages, p), value * static_cast<uint64_t>(shape.latent_width));
        if (!shape.has_index[static_cast<size_t>(layer)]) continue;
        add(kv.IndexKeyAt(layer, s.pages, p), value * static_cast<uint64_t>(shape.index_width));
      }
    }
    return bytes;
  }

  std::vector<std::vector<int32_t>> Tokens() const {
    std::vector<std::vector<int32_t>> all;
    for (const auto& s : table) all.push_back(s->tokens);
    return all;
  }
  int32_t Offered() const {
    int32_t sum = 0;
    for (const auto& s : table) sum += static_cast<int32_t>(s->draft_counts.Offered());
    return sum;
  }
  int32_t Accepted() const {
    int32_t sum = 0;
    for (const auto& s : table) sum += static_cast<int32_t>(s->draft_counts.Accepted());
    return sum;
  }

  const Model& model;
  const VocabMask mask;
  const std::vector<int32_t> stop_ids;
  KvStore kv;
  std::vector<std::unique_ptr<Sequence>> table;
  std::vector<Sequence*> sequences;
};

}  // namespace colibri
