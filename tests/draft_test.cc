// Drafts: the MTP layer's keys and passes, prompt lookup, and what drafts never change.
#include "runtime/draft.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "tests/draft_rig.h"

namespace colibri {
namespace {

const std::string kFixtures = COLIBRI_SOURCE_DIR "/tests/fixtures/";
const std::string kDemo = COLIBRI_SOURCE_DIR "/apps/demo/model";

Model Loaded(const std::string& folder) {
  Model model({folder});
  model.LoadDense();
  return model;
}

const Model& Demo() {
  static const Model model = Loaded(kDemo);
  return model;
}

const Tokenizer& TheTokenizer() {
  static const Tokenizer tokenizer = Tokenizer::Load(kDemo + "/tokenizer.json");
  return tokenizer;
}

std::vector<int32_t> TextPrompt(const std::string& text) {
  auto ids = TheTokenizer().Encode("[gMASK]<sop>", AddedTokens::kRecognise);
  const auto more = TheTokenizer().Encode(text, AddedTokens::kPlain);
  ids.insert(ids.end(), more.begin(), more.end());
  return ids;
}

std::vector<int32_t> RandomPrompt(uint32_t seed, int32_t length, int32_t vocab) {
  std::mt19937 random(seed);
  std::vector<int32_t> ids;
  for (int32_t i = 0; i < length; ++i) {
    ids.push_back(static_cast<int32_t>(random() % static_cast<uint32_t>(vocab)));
  }
  return ids;
}

template <class T>
std::vector<T> FixtureTensor(const std::string& folder, const std::string& name) {
  const Container file({kFixtures + folder});
  const TensorEntry* entry = file.Find(name);
  REQUIRE(entry != nullptr);
  std::vector<T> values(entry->bytes / sizeof(T));
  file.Files().ReadExact(entry->file, entry->offset, std::as_writable_bytes(std::span(values)));
  return values;
}

std::vector<DraftLine> DemoLines(float temperature) {
  std::vector<DraftLine> lines;
  for (const char* text : {"Once upon a time there was", "The detective put down his pipe and",
                           "It was late in the autumn, and the road"}) {
    lines.push_back({TextPrompt(text), 24, temperature});
  }
  return lines;
}

std::function<int32_t(const Sequence&)> Always(int32_t depth) {
  return [depth](const Sequence&) { return depth; };
}

TEST_CASE("keys alone are the bits that the whole MTP layer stores, and they are all it stores") {
  for (const char* folder : {"tiny", "quant-int4-g64", "quant-mixed", "odd-int4-row"}) {
    for (const KvType type : {KvType::kF32, KvType::kBF16}) {
      const Model model = Loaded(kFixtures + folder + "/model");
      const int32_t layer = model.Config().layers;
      const auto stored = [&](bool keys_alone) {
        DraftRig rig(model, TheTokenizer(), {{RandomPrompt(5, 21, 300)}}, type);
        ReferenceEngine engine(model, rig.kv);
        Sequence& s = *rig.table[0];
        REQUIRE(rig.kv.Grow(&s.pages, 21));
        Frame frame(model, {32, 64, 1});
        frame.sequences.assign(1, {});
        frame.sequences[0].sequence = &s;
        frame.sequences[0].pages = &s.pages;
        frame.sequences[0].rows = 21;
        for (int32_t i = 0; i < 21; ++i) {
          FrameRow row;
          row.position = i;
          row.token = s.tokens[static_cast<size_t>(i)];
          frame.rows.push_back(row);
        }
        SerialParallel serial;
        DraftDrawer sink(rig.mask, serial);
        engine.Run(frame, sink);
        for (int32_t i = 0; i + 1 < 21; ++i) {
          frame.rows[static_cast<size_t>(i)].token = s.tokens[static_cast<size_t>(i) + 1];
        }
        const std::string before = rig.Stored(s, 21, 0, layer);
        keys_alone ? engine.RunMtpKeys(frame) : engine.RunMtp(frame, sink);
        CHECK(rig.Stored(s, 21, 0, layer) == before);
        const uint64_t read = engine.BytesRead();
        if (keys_alone) {
          engine.RunMtpKeys(frame);
          CHECK(engine.BytesRead() == read);
        }
        return rig.Stored(s, 21, layer, layer + 1);
      };
      const std::string keys = stored(true);
      CHECK(keys == stored(false));
      CHECK(keys.find_first_not_of('\0') != std::string::npos);
    }
  }
}

TEST_CASE("a pass drafts what the reference implementation drafts") {
  for (const char* folder : {"tiny", "groups", "long", "quant-int8-row", "quant-mixed"}) {
    Model model({kFixtures + folder + "/model"});
    model.SetInt8Activations(false);
    model.LoadDense();
    const auto ids = FixtureTensor<int32_t>(folder, "input_ids");
    const auto want = FixtureTensor<int32_t>(folder, "mtp.drafts.shared_index.ids");
    for (const int32_t rows : {512, 7}) {  // in one frame and in many
      DraftRig rig(model, TheTokenizer(), {{ids, 8}}, KvType::kF32, 16);
      DraftOracleOptions options;
      options.depth = Always(4);
      options.rows = rows;
      options.context = static_cast<int32_t>(ids.size()) + 16;
      std::vector<int32_t> drafts;
      options.verified = [&](const Frame&) {
        if (drafts.empty()) drafts = rig.table[0]->drafts;
      };
      rig.Run(options);
      CHECK_MESSAGE(drafts == want, folder);
    }
  }
}

TEST_CASE("greedy and sampled tokens are those without drafts, for every depth") {
  for (const float temperature : {0.0f, 0.8f}) {
    DraftRig plain(Demo(), TheTokenizer(), DemoLines(temperature), KvType::kBF16);
    plain.Run({});
    CHECK(plain.Offered() == 0);
    for (int32_t depth = 1; depth <= 4; ++depth) {
      DraftRig rig(Demo(), TheTokenizer(), DemoLines(temperature), KvType::kBF16);
      DraftOracleOptions options;
      options.depth = Always(depth);
      rig.Run(options);
      CHECK(rig.Tokens() == plain.Tokens());
      // The model was trained to: about every second first draft is taken.
      CHECK(rig.Accepted() > 0);
      CHECK(rig.Accepted() < rig.Offered());
    }
  }
}

TEST_CASE("sequences of different depths draft side by side as they do alone") {
  const auto lines = DemoLines(0.8f);
  const auto depth_of = [](const Sequence& s) {
    return static_cast<int32_t>(s.line->request.custom_id.back() - '0') * 2;  // 0, 2, 4
  };
  DraftOracleOptions options;
  options.depth = depth_of;
  DraftRig together(Demo(), TheTokenizer(), lines, KvType::kBF16);
  std::map<std::pair<uint32_t, int32_t>, std::vector<int32_t>> drafts;
  options.verified = [&](const Frame& frame) {
    for (const FrameSequence& place : frame.sequences) {
      const Sequence& s = *place.sequence;
      if (s.done) continue;
      drafts[{s.index, s.stored}] = s.drafts;
      CHECK(static_cast<int32_t>(s.drafts.size()) == std::min(depth_of(s), s.stop->Left() - 1));
    }
  };
  together.Run(options);
  for (size_t i = 0; i < lines.size(); ++i) {
    DraftRig alone(Demo(), TheTokenizer(), lines, KvType::kBF16);
    alone.sequences = {alone.table[i].get()};
    options.verified = [&](const Frame&) {
      const Sequence& s = *alone.table[i];
      if (!s.done) CHECK(drafts.at({s.index, s.stored}) == s.drafts);
    };
    alone.Run(options);
  }
}

TEST_CASE("stop strings and max_tokens end a line at the same token with drafts as without") {
  auto lines = DemoLines(0);
  lines[0].max_tokens = 5;
  lines[1].max_tokens = 1;
  lines[2].stop = {"e"};
  DraftRig plain(Demo(), TheTokenizer(), lines, KvType::kBF16);
  plain.Run({});
  DraftRig rig(Demo(), TheTokenizer(), lines, KvType::kBF16);
  DraftOracleOptions options;
  options.depth = Always(4);
  rig.Run(options);
  CHECK(rig.Tokens() == plain.Tokens());
  for (size_t i = 0; i < lines.size(); ++i) CHECK(rig.table[i]->cause == plain.table[i]->cause);
  CHECK(rig.table[2]->cause == StopCause::kStopString);
}

TEST_CASE("an expert of the MTP layer that cannot be read costs drafts and no line anything") {
  DraftRig plain(Demo(), TheTokenizer(), DemoLines(0), KvType::kBF16);
  plain.Run({});
  std::vector<uint32_t> failing;
  for (int32_t e = 0; e < Demo().Config().experts; ++e) {
    failing.push_back(Demo().ExpertItem(Demo().Config().layers, e));
  }
  DraftRig rig(Demo(), TheTokenizer(), DemoLines(0), KvType::kBF16);
  DraftOracleOptions options;
  options.depth = Always(3);
  rig.Run(options, failing);
  CHECK(rig.Tokens() == plain.Tokens());
  CHECK(rig.Offered() == 0);
  for (const auto& s : rig.table) CHECK_FALSE(s->error);
}

// What a run has stored for each sequence whenever so many positions were.
using Snapshots = std::map<std::pair<uint32_t, int32_t>, std::string>;

// Proposes the token that will be drawn with probability `right`, else another one.
DraftOracleOptions RandomDrafts(const std::vector<std::vector<int32_t>>& truth, double right,
                                std::mt19937& random) {
  DraftOracleOptions options;
  options.depth = [&random](const Sequence&) { return static_cast<int32_t>(random() % 5); };
  options.propose = [&truth, right, &random](const Sequence& s, int32_t most,
                                             std::vector<int32_t>* drafts) {
    drafts->clear();
    for (int32_t i = 0; i < most; ++i) {
      const int32_t token = truth[s.index][static_cast<size_t>(s.Known() + i)];
      const bool hit = static_cast<double>(random() % 1000) < right * 1000;
      drafts->push_back(hit ? token : (token + 1) % 300);
    }
  };
  return options;
}

TEST_CASE("whatever was accepted, caches and positions are those of a run without drafts") {
  const Model model = Loaded(kFixtures + "quant-int4-g64/model");
  const int32_t layers = model.LayerCount();
  REQUIRE(layers > model.Config().layers);
  std::vector<DraftLine> lines;
  for (uint32_t i = 0; i < 5; ++i) {
    lines.push_back({RandomPrompt(i, 3 + 4 * static_cast<int32_t>(i), 300),
                     10 + 3 * static_cast<int32_t>(i), i % 2 == 0 ? 0.0f : 1.0f});
  }
  Snapshots want, want_mtp;
  const int32_t main = model.Config().layers;
  DraftOracleOptions plain_options;
  DraftRig plain(model, TheTokenizer(), lines, KvType::kBF16);
  const auto for_each_open = [](const DraftRig& rig, const auto& visit) {
    for (const auto& s : rig.table) {
      if (!s->done && s->Generated() > 0) visit(*s);
    }
  };
  plain_options.verified = [&](const Frame&) {
    for_each_open(plain, [&](const Sequence& s) {
      want[{s.index, s.stored}] = plain.Stored(s, s.stored, 0, main);
      want_mtp[{s.index, s.stored}] = plain.Stored(s, s.stored, main, layers);
    });
  };
  plain.Run(plain_options);
  const auto truth = plain.Tokens();

  std::mt19937 random(7);
  int32_t accepted = 0, rejected = 0, waited = 0;
  for (const double right : {0.0, 0.3, 0.7, 0.95, 1.0, 0.5}) {
    DraftRig rig(model, TheTokenizer(), lines, KvType::kBF16, right < 0.5 ? 4 : 16);
    DraftOracleOptions options = RandomDrafts(truth, right, random);
    options.rows = 13;  // prompts in pieces, and keys that waited
    options.wait = right != 0.3 && right != 1.0;
    options.order = [&random](std::vector<Sequence*>* chosen) {
      std::shuffle(chosen->begin(), chosen->end(), random);
      chosen->resize(1 + random() % chosen->size());
    };
    options.verified = [&](const Frame&) {
      for_each_open(rig, [&](const Sequence& s) {
        CHECK(rig.Stored(s, s.stored, 0, main) == want.at({s.index, s.stored}));
        CHECK(s.unkeyed <= (options.wait ? kWaitingKeys : 0));
        waited += s.unkeyed;
        const int32_t keyed = s.stored - s.unkeyed;
        if (s.stored % rig.kv.Shape().page_tokens == 0) CHECK(s.unkeyed == 0);
        if (keyed < s.prompt) return;
        CHECK(rig.Stored(s, keyed, main, layers) == want_mtp.at({s.index, keyed}));
      });
    };
    rig.Run(options);
    CHECK(rig.Tokens() == truth);
    for (size_t i = 0; i < lines.size(); ++i) {
      const Sequence& s = *rig.table[i];
      CHECK(s.stored == plain.table[i]->stored);
      CHECK(rig.Stored(s, s.stored, 0, main) == plain.Stored(*plain.table[i], s.stored, 0, main));
    }
    accepted += rig.Accepted();
    rejected += rig.Offered() - rig.Accepted();
    if (right == 0.0) CHECK(rig.Accepted() == 0);
    if (right == 1.0) CHECK(rig.Accepted() == rig.Offered());
  }
  CHECK(accepted > 50);
  CHECK(rejected > 50);
  CHECK(waited > 50);
}

std::vector<int32_t> Lookup(std::vector<int32_t> tokens, int32_t most = 4) {
  std::vector<int32_t> drafts{99};
  LookupDrafts(tokens, most, &drafts);
  return drafts;
}

TEST_CASE("prompt lookup copies what followed the last tokens when they stood there before") {
  CHECK(Lookup({1, 2, 3, 4, 5, 6, 7, 8, 2, 3}) == std::vector<int32_t>{4, 5, 6, 7});
  CHECK(Lookup({1, 2, 3, 4, 5, 6, 7, 8, 2, 3}, 2) == std::vector<int32_t>{4, 5});
  CHECK(Lookup({1, 2, 3, 4, 5, 6, 7, 8, 2, 3}, 0).empty());
}

TEST_CASE("prompt lookup finds nothing where fewer than two tokens stand again") {
  CHECK(Lookup({}).empty());
  CHECK(Lookup({1}).empty());
  CHECK(Lookup({1, 1}).empty());
  CHECK(Lookup({1, 2, 3, 1}).empty());
  CHECK(Lookup({1, 2, 3, 4, 5, 9, 3}).empty());
}

TEST_CASE("prompt lookup prefers the longest run, of equal ones the newest") {
  // 7 8 stands twice before, with 3 7 8 at the older place.
  CHECK(Lookup({3, 7, 8, 1, 7, 8, 2, 3, 7, 8}, 1) == std::vector<int32_t>{1});
  CHECK(Lookup({9, 7, 8, 1, 9, 7, 8, 2, 9, 7, 8}, 1) == std::vector<int32_t>{2});
  // Runs of more than four tokens are no better than those of four.
  CHECK(Lookup({5, 1, 2, 3, 4, 70, 6, 1, 2, 3, 4, 80, 5, 1, 2, 3, 4}, 1) ==
        std::vector<int32_t>{80});
}

TEST_CASE("prompt lookup goes on with its own drafts where the text ends") {
  CHECK(Lookup({1, 2, 1, 2}) == std::vector<int32_t>{1, 2, 1, 2});
  CHECK(Lookup({5, 5, 5}) == std::vector<int32_t>{5, 5, 5, 5});
  CHECK(Lookup({1, 2, 3, 1, 2}) == std::vector<int32_t>{3, 1, 2, 3});
}

TEST_CASE("drafts by prompt lookup leave every token as it is") {
  DraftRig plain(Demo(), TheTokenizer(), DemoLines(0), KvType::kBF16);
  plain.Run({});
  DraftRig rig(Demo(), TheTokenizer(), DemoLines(0), KvType::kBF16);
  DraftOracleOptions options;
  options.depth = Always(4);
  options.propose = [](const Sequence& s, int32_t most, std::vector<int32_t>* drafts) {
    LookupDrafts(s.tokens, most, drafts);
  };
  rig.Run(options);
  CHECK(rig.Tokens() == plain.Tokens());
  CHECK(rig.Accepted() > 0);
}

TEST_CASE("drafts are the same whether keys waited for them or not") {
  const auto now_and_then = [](const Sequence& s) { return s.Known() % 7 == 0 ? 4 : 0; };
  std::vector<std::vector<int32_t>> seen[2];
  for (const bool wait : {false, true}) {
    DraftRig rig(Demo(), TheTokenizer(), DemoLines(0), KvType::kBF16, 16);
    DraftOracleOptions options;
    options.depth = now_and_then;
    options.wait = wait;
    options.verified = [&](const Frame&) {
      for (const auto& s : rig.table) seen[wait].push_back(s->drafts);
    };
    rig.Run(options);
    CHECK(rig.Accepted() > 0);
  }
  CHECK(seen[0] == seen[1]);
}

}  // namespace
}  // namespace colibri
