// The end of a frame: tokens drawn and accepted, causes of an end, error texts.
// Length: one frame of sequences, with and without drafts, serves every case.
#include "runtime/verify.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "runtime/tokenizer.h"

namespace colibri {
namespace {

const Model& Headers() {
  static const Model model({COLIBRI_SOURCE_DIR "/tests/fixtures/tiny/model"});
  return model;
}

const Tokenizer& TheTokenizer() {
  static const Tokenizer tokenizer =
      Tokenizer::Load(COLIBRI_SOURCE_DIR "/tests/fixtures/tokenizer/tokenizer.json");
  return tokenizer;
}

int32_t TokenSpelled(const std::string& text) {
  const auto ids = TheTokenizer().Encode(text, AddedTokens::kPlain);
  REQUIRE(ids.size() == 1);
  return ids[0];
}

// A frame with sequences whose rows have just passed the head.
struct Rig {
  static constexpr int32_t kPrompt = 3;

  // `rows` rows of the sequence; the last wants logits unless its prefill goes on.
  Sequence& Add(const Request& request, int32_t max_tokens, int32_t rows = kPrompt,
                bool wants = true) {
    table.push_back(std::make_unique<Sequence>());
    Sequence& s = *table.back();
    s.index = static_cast<uint32_t>(table.size() + 40);
    s.line = std::make_shared<LineState>();
    s.line->request = request;
    s.tokens.assign(kPrompt, 7);
    s.prompt = kPrompt;
    s.logprobs.Reserve(max_tokens, request.top_logprobs);
    s.stop.emplace(TheTokenizer(), stop_ids, request, max_tokens);
    s.owner = frame.id;
    FrameSequence place;
    place.sequence = &s;
    place.pages = &s.pages;
    place.first_row = static_cast<int32_t>(frame.rows.size());
    place.rows = rows;
    for (int32_t i = 0; i < rows; ++i) {
      FrameRow row;
      row.sequence = static_cast<int32_t>(frame.sequences.size());
      row.position = i;
      row.wants_logits = wants && i + 1 == rows;
      frame.rows.push_back(row);
    }
    frame.sequences.push_back(place);
    return s;
  }
  // The next sweep: one row for each sequence that goes on.
  void Next() {
    frame.rows.clear();
    frame.sequences.clear();
    for (const auto& s : table) {
      if (s->done) continue;
      FrameRow row;
      row.sequence = static_cast<int32_t>(frame.sequences.size());
      row.position = s->stored;
      row.wants_logits = true;
      FrameSequence place;
      place.sequence = s.get();
      place.pages = &s->pages;
      place.first_row = static_cast<int32_t>(frame.rows.size());
      place.rows = 1;
      frame.rows.push_back(row);
      frame.sequences.push_back(place);
    }
  }
  // The next sweep of all sequences, of which the first has drafts to verify.
  void NextWith(const std::vector<int32_t>& drafts) {
    Next();
    FrameSequence& place = frame.sequences[0];
    place.rows += static_cast<int32_t>(drafts.size());
    place.drafts = static_cast<int32_t>(drafts.size());
    for (size_t i = 1; i < frame.sequences.size(); ++i) {
      frame.sequences[i].first_row += place.drafts;
    }
    std::vector<FrameRow> rows(drafts.size(), frame.rows[0]);
    for (size_t i = 0; i < drafts.size(); ++i) {
      rows[i].position += static_cast<int32_t>(i) + 1;
      rows[i].token = drafts[i];
      rows[i].draft = true;
    }
    frame.rows.insert(frame.rows.begin() + 1, rows.begin(), rows.end());
  }
  // From the first sequence's rows, base first.
  void DrawAll(const std::vector<int32_t>& tokens) {
    std::copy(tokens.begin(), tokens.end(), frame.drawn.begin());
  }
  int32_t& Drawn(size_t sequence = 0) {
    const FrameSequence& place = frame.sequences[sequence];
    return frame.drawn[static_cast<size_t>(place.first_row + place.rows - 1)];
  }
  FrameRow& Row(size_t sequence = 0) {
    const FrameSequence& place = frame.sequences[sequence];
    return frame.rows[static_cast<size_t>(place.first_row + place.rows - 1)];
  }
  std::vector<Notice> Accept(const FrameFigures& figures = {}) {
    std::vector<Notice> notices;
    AcceptTokens(
        frame, figures, [](uint32_t file) { return "shard-" + std::to_string(file); },
        [&](const Notice& n) {
          for (const auto& s : table) {
            if (s->index == n.sequence) {
              CHECK(s->owner == (n.final != 0 ? int32_t{Sequence::kDeliver} : frame.id));
            }
          }
          notices.push_back(n);
        });
    return notices;
  }

  const std::vector<int32_t> stop_ids{2, 5};
  std::vector<std::unique_ptr<Sequence>> table;
  Frame frame{Headers(), {600, 600, 1}};
};

TEST_CASE("a drawn token is appended and announced") {
  Rig rig;
  Sequence& s = rig.Add({}, 10);
  rig.Drawn() = 11;
  const auto notices = rig.Accept();
  REQUIRE(notices.size() == 1);
  CHECK(notices[0].sequence == s.index);
  CHECK(notices[0].count == 1);
  CHECK(notices[0].final == 0);
  CHECK(s.tokens == std::vector<int32_t>{7, 7, 7, 11});
  CHECK(s.stored == 3);
  CHECK_FALSE(s.done);
  CHECK(s.cause == StopCause::kNone);
}

TEST_CASE("a prefill that goes on has no token and no notice") {
  Rig rig;
  Sequence& s = rig.Add({}, 10, 2, false);
  CHECK(rig.Accept().empty());
  CHECK(s.stored == 2);
  CHECK(s.Known() == 3);
  CHECK_FALSE(s.done);
}

TEST_CASE("any end token ends a choice and is its last token") {
  for (const int32_t id : {2, 5}) {
    Rig rig;
    Sequence& s = rig.Add({}, 1);  // the end token goes before max_tokens
    rig.Drawn() = id;
    const auto notices = rig.Accept();
    REQUIRE(notices.size() == 1);
    CHECK(notices[0].final == 1);
    CHECK(notices[0].count == 1);
    CHECK(s.cause == StopCause::kStopToken);
    CHECK(s.tokens.back() == id);
    CHECK(s.done);
  }
}

TEST_CASE("max_tokens ends a choice as length") {
  Rig rig;
  Sequence& s = rig.Add({}, 2);
  rig.Drawn() = 11;
  CHECK(rig.Accept()[0].final == 0);
  rig.Next();
  rig.Drawn() = 12;
  const auto notices = rig.Accept();
  CHECK(notices[0].final == 1);
  CHECK(notices[0].count == 2);
  CHECK(s.cause == StopCause::kLength);
}

TEST_CASE("a stop string that ends inside a later token ends the choice") {
  Rig rig;
  Request request;
  request.stop = {"xy", "zz"};
  Sequence& s = rig.Add(request, 10);
  rig.Drawn() = TokenSpelled("x");
  CHECK(rig.Accept()[0].final == 0);
  rig.Next();
  rig.Drawn() = TokenSpelled("y");
  CHECK(rig.Accept()[0].final == 1);
  CHECK(s.cause == StopCause::kStopString);
  CHECK(s.stop->MatchedStop() == "xy");
}

TEST_CASE("a line that repeats itself ends as degenerate, unless that is switched off") {
  for (const bool loop_stop : {true, false}) {
    Rig rig;
    Request request;
    request.loop_stop = loop_stop;
    Sequence& s = rig.Add(request, 400);
    for (int i = 0; i < 400 && !s.done; ++i) {
      if (i > 0) rig.Next();
      rig.Drawn() = 20 + i % 3;
      rig.Accept();
    }
    CHECK(s.cause == (loop_stop ? StopCause::kDegenerate : StopCause::kLength));
    CHECK(s.Generated() == (loop_stop ? 256 : 400));
  }
}

TEST_CASE("a failed read names layer, file, offset and reason, and only its own line ends") {
  Rig rig;
  Sequence& failed = rig.Add({}, 10);
  Sequence& fine = rig.Add({}, 10);
  for (size_t r = 0; r < 3; ++r) {
    rig.frame.rows[r].state = RowState::kReadFailed;
    rig.frame.rows[r].failed_layer = 5;
  }
  rig.frame.sequences[0].error = {EIO, 3, 81920};
  rig.Drawn(1) = 11;
  const auto notices = rig.Accept();
  REQUIRE(notices.size() == 2);
  CHECK(notices[0].final == 1);
  CHECK(notices[0].count == 0);
  CHECK(notices[1].final == 0);
  REQUIRE(failed.error);
  CHECK(failed.error->status == 500);
  CHECK(failed.error->code == "read_error");
  for (const char* part : {"layer 5", "shard-3", "81920", "Input/output error"}) {
    CAPTURE(part);
    CHECK(failed.error->message.find(part) != std::string::npos);
  }
  CHECK(failed.cause == StopCause::kNone);
  CHECK_FALSE(fine.error);
  CHECK(fine.Generated() == 1);
}

TEST_CASE("a shard that is too short is called that") {
  Rig rig;
  const Sequence& s = rig.Add({}, 10);
  rig.Row().state = RowState::kReadFailed;
  rig.frame.sequences[0].error = {ENODATA, 1, 4096};
  rig.Accept();
  REQUIRE(s.error);
  CHECK(s.error->message.find("the file ends") != std::string::npos);
}

TEST_CASE("a read that fails during a prefill ends the line too") {
  Rig rig;
  const Sequence& s = rig.Add({}, 10, 2, false);
  rig.Row().state = RowState::kReadFailed;
  rig.frame.sequences[0].error = {EIO, 0, 0};
  const auto notices = rig.Accept();
  REQUIRE(notices.size() == 1);
  CHECK(notices[0].final == 1);
  CHECK(s.done);
}

TEST_CASE("activations that are not finite end the line with position and layer") {
  Rig rig;
  const Sequence& s = rig.Add({}, 10);
  rig.Row().state = RowState::kNotFinite;
  rig.Row().failed_layer = 6;
  CHECK(rig.Accept()[0].final == 1);
  REQUIRE(s.error);
  CHECK(s.error->code == "not_finite");
  CHECK(s.error->message.find("position 2") != std::string::npos);
  CHECK(s.error->message.find("layer 6") != std::string::npos);
}

TEST_CASE("a line that fails after some tokens keeps them apart from its error") {
  Rig rig;
  const Sequence& s = rig.Add({}, 10);
  rig.Drawn() = 11;
  rig.Accept();
  rig.Next();
  rig.Row().state = RowState::kReadFailed;
  rig.frame.sequences[0].error = {EIO, 0, 0};
  const auto notices = rig.Accept();
  CHECK(notices[0].final == 1);
  CHECK(notices[0].count == 1);
  CHECK(s.error);
}

TEST_CASE("bytes read are shared out by rows, hits by sweeps") {
  Rig rig;
  const Sequence& prefill = rig.Add({}, 10, 3);
  const Sequence& other = rig.Add({}, 10, 1);
  rig.Drawn(0) = rig.Drawn(1) = 11;
  rig.Accept({4'000, 0, 0.25});
  CHECK(prefill.bytes_read == 3'000);
  CHECK(other.bytes_read == 1'000);
  CHECK(prefill.hit_sum == 0.25);
  CHECK(prefill.sweeps == 1);
}

TEST_CASE("log probabilities are kept only for lines that asked, one a token") {
  Rig rig;
  Request asks;
  asks.logprobs = true;
  asks.top_logprobs = 1;
  Sequence& with = rig.Add(asks, 10);
  Sequence& without = rig.Add({}, 10);
  for (size_t i = 0; i < 2; ++i) {
    rig.Drawn(i) = 11;
    rig.frame.drawn_logprobs[i * 3 + 2] = {11, -0.5f, {{11, -0.5f}}};
  }
  rig.Accept();
  REQUIRE(with.logprobs.size() == 1);
  CHECK(with.logprobs[0].id == 11);
  CHECK(with.logprobs[0].top.size() == 1);
  CHECK(without.logprobs.empty());
}

// Logits of a row in a frame of the rig, given to a drawer.
void Draw(Rig& rig, size_t row, std::vector<float> logits) {
  const VocabMask mask(std::vector<uint8_t>(logits.size(), 1));
  SerialParallel serial;
  TokenDrawer drawer(mask, serial);
  drawer.Row(rig.frame, row, logits);
}

TEST_CASE("logits that are not finite end the line, not the process") {
  for (const float bad :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
        -std::numeric_limits<float>::infinity()}) {
    Rig rig;
    Request request;
    request.logprobs = true;
    const Sequence& s = rig.Add(request, 10);
    Draw(rig, 2, {1, bad, 0, 2});
    CHECK(rig.Drawn() == -1);
    const auto notices = rig.Accept();
    CHECK(notices[0].final == 1);
    CHECK(notices[0].count == 0);
    REQUIRE(s.error);
    CHECK(s.error->code == "not_finite");
    CHECK(s.error->message.find("logits of position 2") != std::string::npos);
    CHECK(s.Generated() == 0);
    CHECK(s.logprobs.empty());
  }
}

TEST_CASE("a token is drawn for its place in the completion and its choice") {
  const std::vector<float> logits(16, 0.0f);
  const VocabMask mask(std::vector<uint8_t>(16, 1));
  SampleScratch scratch;
  Request request;
  request.custom_id = "a line";
  request.sampling.seed = 9;
  for (int32_t place = 0; place < 20; ++place) {
    Rig rig;
    Sequence& s = rig.Add(request, 100, 1);
    s.choice = place % 3;
    rig.Row().position = Rig::kPrompt - 1 + place;
    Draw(rig, 0, logits);
    CHECK(rig.Drawn() ==
          Sample(logits, request.sampling, "a line", place % 3, place, mask, &scratch));
  }
}

TEST_CASE("a drawn token's log probability is that of the raw logits") {
  Rig rig;
  Request request;
  request.logprobs = true;
  request.top_logprobs = 2;
  request.sampling.temperature = 0;
  const Sequence& s = rig.Add(request, 10);
  Draw(rig, 2, {0, 3, 1, 2});
  rig.Accept();
  REQUIRE(s.logprobs.size() == 1);
  const double z = std::exp(0) + std::exp(3) + std::exp(1) + std::exp(2);
  CHECK(s.logprobs[0].id == 1);
  CHECK(s.logprobs[0].logprob == doctest::Approx(3 - std::log(z)));
  REQUIRE(s.logprobs[0].top.size() == 2);
  CHECK(s.logprobs[0].top[1].first == 3);
}

// A sequence that has generated 11 and verifies drafts behind it.
struct DraftRig : Rig {
  explicit DraftRig(const std::vector<int32_t>& drafts, int32_t max_tokens = 100,
                    const Request& request = {})
      : s(Add(request, max_tokens)) {
    Drawn() = 11;
    Accept();
    s.drafts = drafts;
    NextWith(drafts);
  }
  std::vector<int32_t> Generated() const { return {s.tokens.begin() + kPrompt, s.tokens.end()}; }
  Sequence& s;
};

TEST_CASE("drafts are accepted up to the first that is not the token drawn") {
  const std::vector<std::pair<std::vector<int32_t>, std::vector<int32_t>>> cases = {
      {{21, 22, 23, 24}, {11, 21, 22, 23, 24}},  // all, and one more
      {{21, 22, 99, 24}, {11, 21, 22, 23}},      // what is right again later is right by chance
      {{99, 22, 23}, {11, 21}},
      {{22}, {11, 21}},
      {{}, {11, 21}}};
  for (const auto& [drafts, want] : cases) {
    DraftRig rig(drafts);
    rig.DrawAll({21, 22, 23, 24, 25});
    std::vector<int32_t> tokens = want;
    if (drafts.size() == 4 && drafts[2] == 23) tokens.push_back(25);
    const auto notices = rig.Accept();
    REQUIRE(notices.size() == 1);
    CHECK(rig.Generated() == tokens);
    CHECK(notices[0].count == tokens.size());
    CHECK(rig.s.stored == rig.s.Known() - 1);
    const auto accepted = static_cast<int32_t>(tokens.size()) - 2;
    CHECK(rig.frame.sequences[0].accepted == accepted);
    DraftCounts counted;
    counted.Add(static_cast<int32_t>(drafts.size()), accepted);
    CHECK(rig.s.draft_counts == counted);
    CHECK(rig.s.drafts.empty());
    CHECK_FALSE(rig.s.done);
  }
}

TEST_CASE("a stop among accepted drafts ends the choice there, whatever was drawn behind it") {
  {  // an end token
    DraftRig rig({21, 5, 23});
    rig.DrawAll({21, 5, 23, 24});
    CHECK(rig.Accept()[0].final == 1);
    CHECK(rig.Generated() == std::vector<int32_t>{11, 21, 5});
    CHECK(rig.s.cause == StopCause::kStopToken);
  }
  {  // max_tokens
    DraftRig rig({21, 22, 23}, 3);
    rig.DrawAll({21, 22, 23, 24});
    CHECK(rig.Accept()[0].count == 3);
    CHECK(rig.Generated() == std::vector<int32_t>{11, 21, 22});
    CHECK(rig.s.cause == StopCause::kLength);
  }
  {  // a stop string across two drafts
    Request request;
    request.stop = {"ab"};
    const int32_t a = TokenSpelled("a"), b = TokenSpelled("b");
    DraftRig rig({a, b, 23}, 100, request);
    rig.DrawAll({a, b, 23, 24});
    rig.Accept();
    CHECK(rig.Generated() == std::vector<int32_t>{11, a, b});
    CHECK(rig.s.cause == StopCause::kStopString);
    CHECK(rig.s.stored == rig.s.Known() - 1);
  }
}

TEST_CASE("a failed draft row is a rejected draft, also where its token was right") {
  for (const size_t failed : {size_t{1}, size_t{2}, size_t{3}}) {
    DraftRig rig({21, 22, 23});
    rig.DrawAll({21, 22, 23, 24});
    for (size_t r = failed; r < 4; ++r) rig.frame.rows[r].state = RowState::kReadFailed;
    const auto notices = rig.Accept();
    CHECK(notices[0].final == 0);
    CHECK(rig.s.Generated() == static_cast<int32_t>(failed) + 1);
    CHECK(rig.s.stored == rig.s.Known() - 1);
    CHECK(rig.frame.sequences[0].accepted == static_cast<int32_t>(failed) - 1);
    CHECK_FALSE(rig.s.error);
  }
}

TEST_CASE("a draft whose logits are not finite is rejected: its own sweep tells of it") {
  DraftRig rig({21, 22});
  rig.DrawAll({21, -1, 23});
  rig.Accept();
  CHECK(rig.Generated() == std::vector<int32_t>{11, 21});
  CHECK(rig.s.stored == rig.s.Known() - 1);
  CHECK_FALSE(rig.s.error);
  rig.Next();
  rig.Drawn() = -1;
  CHECK(rig.Accept()[0].final == 1);
  REQUIRE(rig.s.error);
  CHECK(rig.s.error->code == "not_finite");
}

TEST_CASE("a failed base row fails the line whatever its drafts say") {
  DraftRig rig({21, 22});
  rig.DrawAll({21, 22, 23});
  for (size_t r = 0; r < 3; ++r) rig.frame.rows[r].state = RowState::kReadFailed;
  rig.frame.sequences[0].error = {EIO, 3, 4096};
  CHECK(rig.Accept()[0].final == 1);
  REQUIRE(rig.s.error);
  CHECK(rig.s.error->code == "read_error");
  CHECK(rig.Generated() == std::vector<int32_t>{11});
}

TEST_CASE("each accepted token has its log probability, rejected ones have none") {
  Request request;
  request.logprobs = true;
  DraftRig rig({21, 99, 23}, 100, request);
  rig.DrawAll({21, 22, 23, 24});
  for (size_t r = 0; r < 4; ++r) {
    rig.frame.drawn_logprobs[r] = {rig.frame.drawn[r], -0.25f * static_cast<float>(r + 1), {}};
  }
  rig.Accept();
  REQUIRE(rig.s.logprobs.size() == 3);
  CHECK(rig.s.logprobs[1].id == 21);
  CHECK(rig.s.logprobs[2].id == 22);
  CHECK(rig.s.logprobs[2].logprob == -0.5f);
}

TEST_CASE("drafts of one sequence leave the others of its frame as they are") {
  Rig rig;
  Sequence& with = rig.Add({}, 100);
  Sequence& without = rig.Add({}, 100);
  rig.Drawn(0) = rig.Drawn(1) = 11;
  rig.Accept();
  rig.NextWith({21, 22});
  rig.DrawAll({21, 22, 23});
  rig.Drawn(1) = 31;
  rig.Accept({400, 0});
  CHECK(with.tokens == std::vector<int32_t>{7, 7, 7, 11, 21, 22, 23});
  CHECK(without.tokens == std::vector<int32_t>{7, 7, 7, 11, 31});
  CHECK(with.bytes_read == 300);
  CHECK(without.bytes_read == 100);
}

}  // namespace
}  // namespace colibri
