// Shard headers, good and malformed, and the search for shards.
#include "io/container.h"

#include <doctest/doctest.h>
#include <sys/stat.h>

#include <filesystem>

#include "io/error.h"
#include "io/safetensors_header.h"
#include "tests/shard_files.h"

namespace colibri {
namespace {

// The message about a directory whose only shard has these bytes; "" when it is accepted.
std::string Complaint(const std::string& shard) {
  const TempDir dir;
  dir.Write("out-00000.safetensors", shard);
  std::string message = MessageOf<ModelError>([&] { Container({dir.Path("")}); });
  if (!message.empty()) {
    CHECK_MESSAGE(Contains(message, "out-00000.safetensors"), "the file is named: " << message);
  }
  return message;
}

std::string HeaderComplaint(const std::string& header, const std::string& data = "") {
  return Complaint(RawShard(header, data));
}

const std::string kFourBytes = "abcd";

TEST_CASE("a well-formed shard gives each tensor's place, type and shape") {
  const TempDir dir;
  dir.Write("out-00000.safetensors",
            ShardOf({{"a", {"U8", {3}, "xyz"}}, {"b", {"F32", {1, 2}, "12345678"}}}));
  const Container container({dir.Path("")});
  REQUIRE(container.TensorCount() == 2);
  CHECK(container.Find("c") == nullptr);
  const TensorEntry& b = *container.Find("b");
  CHECK(b.dtype == DType::kF32);
  CHECK(b.shape == std::vector<int64_t>{1, 2});
  CHECK(TensorBytes(container, "b") == "12345678");
  CHECK(TensorBytes(container, "a") == "xyz");
  CHECK(container.Names() == std::vector<std::string>{"a", "b"});
}

TEST_CASE("an empty file and one shorter than its length field are refused") {
  CHECK(Contains(Complaint(""), "empty or truncated: 0 bytes"));
  CHECK(Contains(Complaint(std::string("\1\0\0", 3)), "3 bytes"));
}

TEST_CASE("a Git LFS pointer is recognised") {
  CHECK(Contains(Complaint("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"),
                 "Git LFS pointer"));
}

TEST_CASE("a text file is recognised") {
  CHECK(Contains(Complaint("<html><body>404 not found</body></html>"), "text"));
  CHECK(Contains(Complaint("no\n"), "text"));
}

TEST_CASE("header lengths of zero, beyond the file and near 2^64 are refused") {
  CHECK(Contains(Complaint(std::string(8, '\0')), "header length 0"));
  std::string shard = RawShard("{}");
  shard[0] = 3;
  CHECK(Contains(Complaint(shard), "truncated"));
  CHECK(Contains(Complaint(std::string(8, '\xff') + "{}"), "truncated"));
}

TEST_CASE("a header above the limit is refused before it is read") {
  const TempDir dir;
  const uint64_t length = kMaxHeaderBytes + 1;
  std::string start;
  for (size_t i = 0; i < 8; ++i) start += static_cast<char>(length >> 8 * i & 0xff);
  const std::string path = dir.Write("a.safetensors", start);
  std::filesystem::resize_file(path, length + 8);
  CHECK(Contains(MessageOf<ModelError>([&] { Container({dir.Path("")}); }), "at most 100000000"));
}

TEST_CASE("a header that is no JSON object is refused") {
  CHECK(Contains(HeaderComplaint("[1]"), "does not start with '{'"));
  CHECK(Contains(HeaderComplaint(" {}"), "does not start with '{'"));
  CHECK(Contains(HeaderComplaint("\xef\xbb\xbf{}"), "does not start with '{'"));
  CHECK(Contains(HeaderComplaint("{"), "not valid JSON"));
  CHECK(Contains(HeaderComplaint("{a:1}"), "not valid JSON"));
  CHECK(Contains(HeaderComplaint("{} x"), "not valid JSON"));
  CHECK(Contains(HeaderComplaint("{\"\xff\":1}"), "not valid JSON"));
  CHECK(Contains(HeaderComplaint(std::string("{}\0", 3)), "NUL byte"));
  CHECK(HeaderComplaint("{}   ").empty());
}

TEST_CASE("deep nesting is refused without recursion") {
  CHECK(
      Contains(HeaderComplaint(R"({"a":)" + std::string(200000, '[')), "an array is out of place"));
  CHECK(Contains(HeaderComplaint(R"({"a":{"shape":)" + std::string(200000, '[')),
                 "an array is out of place"));
}

TEST_CASE("fields of the wrong kind are refused by tensor") {
  for (const char* entry :
       {"1", "null", "[]", "\"x\"", R"({"dtype":1})", R"({"dtype":"F33"})", R"({"shape":4})",
        R"({"shape":["4"]})", R"({"shape":[-1]})", R"({"shape":[-0]})", R"({"shape":[1e3]})",
        R"({"shape":[1.0]})", R"({"shape":[18446744073709551615]})",
        R"({"shape":[1,1,1,1,1,1,1,1,1]})", R"({"data_offsets":[0,1,2]})", R"({"extra":1})",
        R"({"data_offsets":{}})", R"({"data_offsets":[true,1]})"}) {
    CAPTURE(entry);
    CHECK(Contains(HeaderComplaint(std::string(R"({"t":)") + entry + "}"),
                   "bad safetensors header at t:"));
  }
}

TEST_CASE("a missing field is named") {
  CHECK(Contains(HeaderComplaint(R"({"t":{"shape":[4],"data_offsets":[0,4]}})", kFourBytes),
                 "dtype is missing"));
  CHECK(Contains(HeaderComplaint(R"({"t":{"dtype":"U8","data_offsets":[0,4]}})", kFourBytes),
                 "shape is missing"));
  CHECK(Contains(HeaderComplaint(R"({"t":{"dtype":"U8","shape":[4]}})", kFourBytes),
                 "data_offsets is missing"));
  CHECK(Contains(
      HeaderComplaint(R"({"t":{"dtype":"U8","shape":[4],"data_offsets":[0]}})", kFourBytes),
      "fewer than two numbers"));
}

TEST_CASE("a field or a tensor given twice is refused") {
  CHECK(Contains(HeaderComplaint(R"({"t":{"dtype":"U8","dtype":"F32","shape":[4],)"
                                 R"("data_offsets":[0,4]}})",
                                 kFourBytes),
                 "dtype is given twice"));
  const std::string u8 = R"({"dtype":"U8","shape":[4],"data_offsets":[0,4]})";
  const std::string f32 = R"({"dtype":"F32","shape":[1],"data_offsets":[0,4]})";
  CHECK(Contains(HeaderComplaint(R"({"t":)" + u8 + R"(,"t":)" + f32 + "}", kFourBytes),
                 "tensor t is given twice"));
  // Equal once the escape is read.
  CHECK(Contains(HeaderComplaint(R"({"t":)" + u8 + R"(,"\u0074":)" + f32 + "}", kFourBytes),
                 "tensor t is given twice"));
}

TEST_CASE("reversed and out-of-range offsets are refused") {
  CHECK(Contains(
      HeaderComplaint(R"({"t":{"dtype":"U8","shape":[4],"data_offsets":[4,0]}})", kFourBytes),
      "reversed"));
  CHECK(Contains(HeaderComplaint(R"({"t":{"dtype":"U8","shape":[4],)"
                                 R"("data_offsets":[18446744073709551611,18446744073709551615]}})",
                                 kFourBytes),
                 "beyond 2^64"));
}

TEST_CASE("a truncated file is told with both sizes") {
  const std::string header = R"({"t":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})";
  const auto size = [&](size_t data) { return std::to_string(8 + header.size() + data); };
  CHECK(Contains(HeaderComplaint(header, "abc"),
                 "truncated: has " + size(3) + " bytes, header says " + size(4)));
}

TEST_CASE("bytes after the last tensor are refused") {
  CHECK(Contains(HeaderComplaint(R"({"t":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})",
                                 kFourBytes + "PK"),
                 "2 bytes after the last tensor"));
}

TEST_CASE("holes and overlaps are refused") {
  const std::string hole = R"({"t":{"dtype":"U8","shape":[3],"data_offsets":[1,4]}})";
  CHECK(Contains(HeaderComplaint(hole, kFourBytes), "does not start at the end"));
  const std::string overlap = R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},)"
                              R"("b":{"dtype":"U8","shape":[3],"data_offsets":[1,4]}})";
  CHECK(Contains(HeaderComplaint(overlap, kFourBytes), "b overlaps"));
}

TEST_CASE("a shape that does not give the byte count is refused") {
  CHECK(
      Contains(HeaderComplaint(R"({"t":{"dtype":"F32","shape":[1000,1000],"data_offsets":[0,4]}})",
                               kFourBytes),
               "shape [1000, 1000] of F32 needs 4000000 bytes, data_offsets give 4"));
  CHECK(Contains(
      HeaderComplaint(R"({"t":{"dtype":"U8","shape":[5],"data_offsets":[0,4]}})", kFourBytes),
      "needs 5 bytes"));
}

TEST_CASE("shapes whose product wraps around are refused") {
  for (const char* shape : {"[4194305,4194305,211106198978564]", "[4294967296,4294967296]",
                            "[9223372036854775807,2]", "[2305843009213693952]"}) {
    CAPTURE(shape);
    const std::string header =
        std::string(R"({"t":{"dtype":"F32","shape":)") + shape + R"(,"data_offsets":[0,4]}})";
    CHECK(Contains(HeaderComplaint(header, kFourBytes), "overflows"));
  }
}

TEST_CASE("overlong and empty tensor names are refused without repeating them") {
  const std::string entry = R"(":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})";
  const std::string message = HeaderComplaint("{\"" + std::string(100000, 'n') + entry, kFourBytes);
  CHECK(Contains(message, "a tensor name of 100000 bytes"));
  CHECK(message.size() < 400);
  CHECK(Contains(HeaderComplaint("{\"" + entry, kFourBytes), "a tensor name of 0 bytes"));
}

TEST_CASE("metadata must map strings to strings, once") {
  CHECK(HeaderComplaint(R"({"__metadata__":{"format":"pt"}})").empty());
  for (const char* metadata : {"1", "null", R"({"a":1})", R"({"a":{"b":"c"}})", R"(["a"])"}) {
    CAPTURE(metadata);
    CHECK(Contains(HeaderComplaint(std::string(R"({"__metadata__":)") + metadata + "}"),
                   "out of place"));
  }
  CHECK(Contains(HeaderComplaint(R"({"__metadata__":{"a":"b","a":"c"}})"), "given twice"));
  CHECK(Contains(HeaderComplaint(R"({"__metadata__":{},"__metadata__":{}})"), "given twice"));
}

TEST_CASE("a hundred thousand tiny tensors are read") {
  std::string header = "{";
  for (int i = 0; i < 100000; ++i) {
    header += fmt::format(R"({}"t{}":{{"dtype":"U8","shape":[1],"data_offsets":[{},{}]}})",
                          i == 0 ? "" : ",", i, i, i + 1);
  }
  CHECK(HeaderComplaint(header + "}", std::string(100000, 'x')).empty());
}

TEST_CASE("stamps are found, repeated ones collapse, contradictory ones are refused") {
  const TempDir dir;
  const auto metadata = [](const std::string& stamps) {
    return R"({"colibri.fmt":")" + stamps + "\"}";
  };
  dir.Write("a.safetensors", ShardOf({}, metadata(R"({\"x\":\"int8-row\",\"y\":\"int4-row\"})")));
  dir.Write("b.safetensors", ShardOf({}, metadata(R"({\"x\":\"int8-row\"})")));
  {
    const Container container({dir.Path("")});
    CHECK(container.Stamp("x") == "int8-row");
    CHECK(container.Stamp("y") == "int4-row");
    CHECK(container.Stamp("z").empty());
  }
  dir.Write("b.safetensors", ShardOf({}, metadata(R"({\"y\":\"int8-row\"})")));
  const std::string message = MessageOf<ModelError>([&] { Container({dir.Path("")}); });
  CHECK(Contains(message, "b.safetensors"));
  CHECK(Contains(message, "y is stamped int8-row, elsewhere int4-row"));
}

TEST_CASE("stamps that are no object of strings, too many or doubled are refused") {
  const auto complaint = [](const std::string& stamps) {
    return Complaint(ShardOf({}, R"({"colibri.fmt":")" + stamps + "\"}"));
  };
  CHECK(Contains(complaint("[]"), "not an object"));
  CHECK(Contains(complaint("{"), "not valid JSON"));
  CHECK(Contains(complaint(R"({\"x\":1})"), "not a string"));
  CHECK(Contains(complaint(R"({\"x\":\"int8-row\",\"x\":\"int4-row\"})"), "given twice"));
  std::string many = "{";
  for (int i = 0; i < 4097; ++i) {
    many += fmt::format(R"({}\"t{}\":\"int8-row\")", i == 0 ? "" : ",", i);
  }
  CHECK(Contains(complaint(many + "}"), "more than 4096"));
}

TEST_CASE("of a tensor in two shards the first in sorted order wins") {
  const TempDir dir;
  dir.Write("b.safetensors", ShardOf({{"t", {"U8", {1}, "b"}}}));
  dir.Write("a.safetensors", ShardOf({{"t", {"U8", {1}, "a"}}}));
  const Container container({dir.Path("")});
  CHECK(TensorBytes(container, "t") == "a");
  const std::string folder = dir.Path("");
  CHECK(container.RepeatNote() == "tensor t is in " + folder + "/a.safetensors and again in " +
                                      folder + "/b.safetensors: the first is used");
}

TEST_CASE("where every tensor is in one shard nothing is said of two") {
  const TempDir dir;
  dir.Write("b.safetensors", ShardOf({{"t", {"U8", {1}, "b"}}}));
  dir.Write("a.safetensors", ShardOf({{"s", {"U8", {1}, "a"}}}));
  CHECK(Container({dir.Path("")}).RepeatNote().empty());
}

TEST_CASE("further directories extend the search and the first file of a name wins") {
  const TempDir first, second;
  first.Write("out-00001.safetensors", ShardOf({{"t", {"U8", {1}, "1"}}}));
  second.Write("out-00001.safetensors", ShardOf({{"t", {"U8", {1}, "2"}}}));
  second.Write("out-00000.safetensors", ShardOf({{"u", {"U8", {1}, "3"}}}));
  const Container container({first.Path(""), second.Path("")});
  CHECK(TensorBytes(container, "t") == "1");
  CHECK(TensorBytes(container, "u") == "3");
  CHECK(container.Files().Count() == 2);
  CHECK(Contains(container.Files().Path(0), "out-00000"));
}

TEST_CASE("hidden files and other files are not shards") {
  const TempDir dir;
  dir.Write("._out-00000.safetensors", "resource fork");
  dir.Write("config.json", "{}");
  dir.Write("out-00000.safetensors.part", "");
  const std::string message = MessageOf<ModelError>([&] { Container({dir.Path("")}); });
  CHECK(Contains(message, "no *.safetensors file"));
  CHECK(Contains(message, "out-00000.safetensors"));
}

TEST_CASE("a directory that is not there, or a file, is told apart") {
  const TempDir dir;
  CHECK(Contains(MessageOf<ModelError>([&] { Container({dir.Path("nowhere")}); }),
                 "No such file or directory"));
  const std::string file = dir.Write("model.gguf", "GGUF");
  CHECK(Contains(MessageOf<ModelError>([&] { Container({file}); }), "not a directory"));
  CHECK(Contains(MessageOf<ModelError>([&] { Container({}); }), "no model directory"));
}

TEST_CASE("a FIFO or a directory named like a shard is refused, not opened") {
  const TempDir dir;
  REQUIRE(mkfifo(dir.Path("a.safetensors").c_str(), 0600) == 0);
  CHECK(Contains(MessageOf<ModelError>([&] { Container({dir.Path("")}); }), "not a regular file"));
  std::filesystem::remove(dir.Path("a.safetensors"));
  std::filesystem::create_directory(dir.Path("a.safetensors"));
  CHECK(Contains(MessageOf<ModelError>([&] { Container({dir.Path("")}); }), "not a regular file"));
}

TEST_CASE("symbolic links to shards are followed and dangling ones named") {
  const TempDir dir;
  dir.Write("blob", ShardOf({{"t", {"U8", {1}, "x"}}}));
  std::filesystem::create_symlink(dir.Path("blob"), dir.Path("a.safetensors"));
  CHECK(Container({dir.Path("")}).TensorCount() == 1);
  std::filesystem::remove(dir.Path("blob"));
  CHECK(Contains(MessageOf<ModelError>([&] { Container({dir.Path("")}); }), "a.safetensors"));
}

}  // namespace
}  // namespace colibri
