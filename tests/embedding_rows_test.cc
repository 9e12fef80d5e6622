// Rows of an embedding that is not in memory: which are read, what they become, what a failure
// costs.
#include "runtime/embedding_rows.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "kernels/kernels.h"
#include "runtime/weights_visit.h"
#include "tests/fake_reader.h"
#include "tests/shard_files.h"

namespace colibri {
namespace {

constexpr int32_t kRows = 6;

// Each row a sequence of its own, unless `per_sequence` says otherwise.
void Fill(Frame& frame, const std::vector<int32_t>& tokens, int32_t per_sequence = 1) {
  frame.rows.clear();
  frame.sequences.clear();
  for (size_t i = 0; i < tokens.size(); ++i) {
    const auto row = static_cast<int32_t>(i);
    if (row % per_sequence == 0) {
      frame.sequences.push_back({});
      frame.sequences.back().first_row = row;
    }
    ++frame.sequences.back().rows;
    frame.rows.push_back({});
    frame.rows.back().sequence = static_cast<int32_t>(frame.sequences.size()) - 1;
    frame.rows.back().token = tokens[i];
  }
}

struct Rig {
  explicit Rig(const char* fixture)
      : model({FixtureModel(fixture)}), whole({FixtureModel(fixture)}) {
    model.LoadDense({.embedding = false});
    whole.LoadDense();
    reader.emplace(&model.Files().Files());
    rows.emplace(model, *reader, 1, kRows);
    rows->Start([this](uint16_t, int32_t) { ++arrived; });
    frame = std::make_unique<Frame>(model, FrameShape{kRows, 8, 1});
  }
  ~Rig() { reader->Stop(); }

  std::vector<float> Expected(int32_t token) const {
    std::vector<float> x(frame->HiddenSize());
    DequantiseRow(whole.Embedding(), token, x.data());
    return x;
  }
  std::vector<float> Got(size_t row) const {
    const float* x = frame->x + row * frame->HiddenSize();
    return {x, x + frame->HiddenSize()};
  }
  // The job that reads the token's row.
  uint64_t JobOf(int32_t token) const {
    const TensorEntry& table = *model.Files().Find(kEmbeddingName);
    const PackedMatrix& m = model.Embedding();
    const uint64_t at = table.offset + static_cast<uint64_t>(token) * RowBytes(m.format, m.cols);
    for (const FakeReader::Pending& p : reader->All()) {
      const Extent& e = p.job.extents.front();
      if (e.file == table.file && e.offset <= at && at < e.offset + e.bytes) return p.job.id;
    }
    FAIL("token ", token, " is not being read");
    return 0;
  }

  Model model, whole;
  std::optional<FakeReader> reader;
  std::optional<EmbeddingRows> rows;
  std::unique_ptr<Frame> frame;
  int arrived = 0;
};

}  // namespace

TEST_CASE("rows read one by one are the rows of the table, in every format") {
  for (const char* fixture : {"tiny", "groups", "long", "quant-int4-g64", "quant-int8-row",
                              "quant-int4-row", "odd-int4-row", "quant-mixed"}) {
    CAPTURE(fixture);
    Rig rig(fixture);
    const int32_t last = rig.model.Config().vocab - 1;
    const std::vector<int32_t> tokens = {last, 0, 7, 100, 7, 1};
    Fill(*rig.frame, tokens);
    rig.rows->Prepare(*rig.frame, 0);
    CHECK(rig.reader->PendingCount() == 5);  // 7 once
    CHECK_FALSE(rig.rows->Await(*rig.frame, 0));
    while (rig.reader->PendingCount() > 1) rig.reader->CompleteOldest();
    CHECK(rig.arrived == 0);
    rig.reader->CompleteOldest();
    CHECK(rig.arrived == 1);
    rig.rows->Begin(*rig.frame, 0);
    for (size_t i = 0; i < tokens.size(); ++i) {
      CHECK_MESSAGE(rig.Got(i) == rig.Expected(tokens[i]), "token ", tokens[i]);
    }
    CHECK(rig.rows->Stats().waits == 1);
    CHECK(rig.rows->Stats().bytes_demand >= 5 * kIoAlign);
  }
}

TEST_CASE("only layer 0 needs them, and what is there is not waited for") {
  Rig rig("quant-int8-row");
  Fill(*rig.frame, {3});
  rig.rows->Prepare(*rig.frame, 0);
  rig.reader->CompleteOldest();
  CHECK(rig.rows->Await(*rig.frame, 0));
  rig.rows->Begin(*rig.frame, 0);
  rig.frame->x[0] = 42;
  for (int32_t layer = 1; layer <= rig.model.Config().layers; ++layer) {
    rig.rows->Prepare(*rig.frame, layer);
    CHECK(rig.rows->Await(*rig.frame, layer));
    rig.rows->Begin(*rig.frame, layer);
  }
  CHECK(rig.reader->Submissions() == 1);
  CHECK(rig.frame->x[0] == 42);
  CHECK(rig.arrived == 0);
}

TEST_CASE("a row that cannot be read fails the sequences with its token alone") {
  Rig rig("quant-int8-row");
  const int32_t far = rig.model.Config().vocab - 1;  // in other pages than the first tokens
  Fill(*rig.frame, {0, 1, far, 2, 0, 1}, 2);
  rig.rows->Prepare(*rig.frame, 0);
  CHECK_FALSE(rig.rows->Await(*rig.frame, 0));
  rig.reader->Complete(rig.JobOf(far), EIO);
  while (rig.reader->CompleteOldest()) {
  }
  CHECK(rig.arrived == 1);
  rig.rows->Begin(*rig.frame, 0);
  for (size_t r = 0; r < 6; ++r) {
    const bool failed = r == 2 || r == 3;
    CHECK((rig.frame->rows[r].state == RowState::kReadFailed) == failed);
    if (!failed) CHECK(rig.Got(r) == rig.Expected(rig.frame->rows[r].token));
  }
  CHECK(rig.frame->sequences[1].error.error == EIO);
  CHECK(rig.frame->sequences[1].failed == FailedRead::kEmbedding);
  CHECK(rig.rows->Stats().failures == 1);
}

}  // namespace colibri
