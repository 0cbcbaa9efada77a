// safetensors files and checkpoint directories: what is read, and every way in which they can be wrong.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "gannet/error.h"
#include "model/checkpoint.h"
#include "model/safetensors.h"

namespace {

using gannet::Checkpoint;
using gannet::DType;
using gannet::Error;
using gannet::ErrorCode;
using gannet::SafetensorsFile;
using gannet::TensorRef;
using Json = nlohmann::ordered_json;
namespace fs = std::filesystem;

const std::string kModel = std::string(GANNET_SOURCE_DIR) + "/models/tiny-dsv32";
const std::string kCheckpoints = std::string(GANNET_SOURCE_DIR) + "/tests/data/checkpoints/";

/// The bytes of a file with this header text and this much data, which counts 0, 1, 2, ...
std::string file_bytes(const std::string& header, size_t data_bytes) {
  std::string bytes(8, '\0');
  const uint64_t length = header.size();
  std::memcpy(bytes.data(), &length, 8);
  bytes += header;
  for (size_t i = 0; i < data_bytes; ++i) bytes += static_cast<char>(i);
  return bytes;
}

Json tensor(const std::string& dtype, const Json& shape, const Json& begin, const Json& end) {
  return {{"dtype", dtype}, {"shape", shape}, {"data_offsets", Json::array({begin, end})}};
}

SafetensorsFile parse(const std::string& bytes) {
  return SafetensorsFile::parse(std::as_bytes(std::span(bytes.data(), bytes.size())), "f.safetensors");
}

void expect_error(const std::string& bytes, const std::string& part) {
  try {
    parse(bytes);
    ADD_FAILURE() << "accepted; expected: " << part;
  } catch (const Error& e) {
    const std::string text = e.what();
    EXPECT_EQ(e.code(), ErrorCode::kCorruptFile) << text;
    EXPECT_NE(text.find(part), std::string::npos) << text;
    EXPECT_NE(text.find("f.safetensors"), std::string::npos) << text;
    EXPECT_EQ(text.find('\n'), std::string::npos) << text;
  }
}

void expect_header_error(const Json& header, size_t data_bytes, const std::string& part) {
  SCOPED_TRACE(header.dump());
  expect_error(file_bytes(header.dump(), data_bytes), part);
}

TEST(Safetensors, ReadsTensors) {
  const Json header = {{"__metadata__", {{"format", "pt"}}},
                       {"b", tensor("I32", {2, 2}, 0, 16)},
                       {"a", tensor("BF16", {3}, 16, 22)},
                       {"empty", tensor("F32", {0, 7}, 22, 22)},
                       {"scalar", tensor("U8", Json::array(), 22, 23)}};
  const std::string bytes = file_bytes(header.dump() + "   ", 23);  // writers pad the header with spaces
  const SafetensorsFile file = parse(bytes);
  ASSERT_EQ(file.tensors().size(), 4u);
  EXPECT_EQ(file.tensors()[0].name, "a");
  EXPECT_EQ(file.metadata().at("format"), "pt");
  EXPECT_EQ(file.num_bytes(), static_cast<int64_t>(bytes.size()));
  const TensorRef& b = file.require("b", {DType::kF32, DType::kI32}, {2, 2});
  EXPECT_EQ(b.dtype, DType::kI32);
  EXPECT_EQ(b.values<int32_t>()[1], 0x07060504);
  EXPECT_EQ(file.find("scalar")->num_elements(), 1);
  EXPECT_EQ(file.find("empty")->num_elements(), 0);
  EXPECT_EQ(file.find("none"), nullptr);
  EXPECT_THROW(b.values<float>(), Error);
  EXPECT_EQ(describe(b), "I32[2, 2]");
}

TEST(Safetensors, AlignsWhateverTheFileDoes) {
  for (size_t shift = 0; shift < 8; ++shift) {
    const Json header = {
        {"pad", tensor("U8", {1}, 0, 1)}, {"x", tensor("F32", {2}, 1, 9)}, {"y", tensor("I64", {1}, 9, 17)}};
    const std::string bytes = file_bytes(header.dump() + std::string(shift, ' '), 17);
    const SafetensorsFile file = parse(bytes);
    for (const TensorRef& t : file.tensors()) {
      const size_t size = gannet::size_of(t.dtype);
      EXPECT_EQ(reinterpret_cast<uintptr_t>(t.data) % size, 0u);
      EXPECT_EQ(static_cast<int>(t.data[0]), t.name == "pad" ? 0 : t.name == "x" ? 1 : 9);
    }
  }
}

TEST(Safetensors, WidensToFloat) {
  const Json header = {
      {"b", tensor("BF16", {2}, 0, 4)}, {"e", tensor("F8_E4M3", {2}, 4, 6)}, {"i", tensor("I32", {1}, 6, 10)}};
  std::string bytes = file_bytes(header.dump(), 10);
  const std::string data = {'\x80', '\x3F', '\x20', '\xC0', '\x38', '\xFE'};  // 1, -2.5; 1, -448
  bytes.replace(bytes.size() - 10, 6, data);
  const SafetensorsFile file = parse(bytes);
  float out[2];
  file.find("b")->to_float(out);
  EXPECT_EQ(out[0], 1.0f);
  EXPECT_EQ(out[1], -2.5f);
  file.find("e")->to_float(out);
  EXPECT_EQ(out[0], 1.0f);
  EXPECT_EQ(out[1], -448.0f);
  EXPECT_THROW(file.find("i")->to_float(out), Error);
}

TEST(Safetensors, ListsTypesThatItCannotRead) {
  const Json header = {{"d", tensor("F64", {1}, 0, 8)}, {"s", tensor("I16", {2}, 8, 12)}};
  const SafetensorsFile file = [&] {
    static const std::string bytes = file_bytes(header.dump(), 12);
    return parse(bytes);
  }();
  EXPECT_FALSE(file.find("d")->readable);
  EXPECT_THROW(file.require("d", {DType::kF32, DType::kU8}, {1}), Error);
  EXPECT_THROW(file.require("s", {DType::kU8}, {2}), Error);
  EXPECT_THROW(file.find("s")->values<uint8_t>(), Error);
}

TEST(Safetensors, RefusesBadHeaderLengths) {
  expect_error("", "has 0 bytes");
  expect_error("1234567", "has 7 bytes");
  expect_error(std::string(8, '\0'), "does not begin with '{'");
  expect_error(std::string(8, '\xFF') + "{}", "header length is 18446744073709551615");
  std::string bytes = file_bytes("{}", 0);
  bytes[0] = 3;
  expect_error(bytes, "header length is 3; the file has 2 bytes after it");
  bytes[0] = 1;
  expect_error(bytes, "is not valid JSON");
  expect_error(file_bytes(" {}", 0), "does not begin");
  expect_error(file_bytes("{\"a\"", 0), "is not valid JSON");
}

TEST(Safetensors, RefusesBadEntries) {
  const auto with = [](const char* key, const Json& value, const std::string& part) {
    Json t = tensor("F32", {2}, 0, 8);
    t[key] = value;
    expect_header_error({{"w", t}}, 8, part);
  };
  with("dtype", "F33", "tensor \"w\".dtype is \"F33\"");
  with("dtype", 5, "dtype is 5");
  with("dtype", nullptr, "dtype is null");
  with("shape", 2, "shape is 2");
  with("shape", {-2}, "shape has the size -2");
  with("shape", {2.0}, "shape has the size 2.0");
  with("shape", {"2"}, "shape has the size \"2\"");
  with("shape", {uint64_t{1} << 63}, "shape has the size 9223372036854775808");
  with("shape", {uint64_t{1} << 62, 4}, "exceeds 2^63 - 1");
  with("shape", {uint64_t{1} << 32, uint64_t{1} << 32}, "exceeds 2^63 - 1");
  with("shape", {uint64_t{1} << 61}, "exceeds 2^63 - 1");
  with("shape", {1, 1, 1, 1, 1, 1, 1, 1, 2}, "at most 8 sizes");
  with("shape", {3}, "8 bytes; F32[3] takes 12");
  with("data_offsets", {0}, "data_offsets is an array of 1");
  with("data_offsets", {0, 8, 8}, "data_offsets is an array of 3");
  with("data_offsets", {-1, 7}, "data_offsets is");
  with("data_offsets", {0.0, 8.0}, "data_offsets is");
  with("data_offsets", {8, 0}, "data_offsets is [8, 0]");
  with("data_offsets", {1, 9}, "data_offsets is [1, 9]");
  with("data_offsets", {0, ~uint64_t{0}}, "data_offsets is [0, 18446744073709551615]");
  expect_header_error({{"w", 5}}, 8, "tensor \"w\" is 5");
  expect_header_error({{"__metadata__", {{"a", 1}}}}, 0, "__metadata__.a is 1");
  expect_header_error({{"__metadata__", {{"two\nlines", 1}}}}, 0, "__metadata__.\"two\\nlines\" is 1");
  expect_header_error({{"__metadata__", {{std::string(100, 'a'), 1}}}}, 0, "__metadata__.\"aaa");
  // A size of 0 makes an overflow before or after it harmless.
  for (const Json& shape :
       {Json{0, uint64_t{1} << 62, uint64_t{1} << 62}, Json{uint64_t{1} << 62, uint64_t{1} << 62, 0}}) {
    const std::string bytes = file_bytes(Json{{"w", tensor("F32", shape, 0, 0)}}.dump(), 0);
    EXPECT_EQ(parse(bytes).find("w")->num_elements(), 0);
  }
}

TEST(Safetensors, RefusesOverlapsHolesAndRests) {
  expect_header_error({{"a", tensor("U8", {4}, 0, 4)}, {"b", tensor("U8", {4}, 2, 6)}}, 6,
                      "tensor \"b\" begins at 2 and overlaps tensor \"a\", which ends at 4");
  expect_header_error({{"a", tensor("U8", {4}, 0, 4)}, {"b", tensor("U8", {4}, 0, 4)}}, 4, "overlaps");
  expect_header_error({{"a", tensor("U8", {8}, 0, 8)}, {"b", tensor("U8", {2}, 3, 5)}}, 8, "overlaps");
  expect_header_error({{"a", tensor("U8", {4}, 0, 4)}, {"b", tensor("U8", {4}, 5, 9)}}, 9, "bytes 4 to 5");
  expect_header_error({{"a", tensor("U8", {4}, 0, 4)}}, 5, "the tensors end at 4; the file has 5");
  expect_header_error(Json::object(), 1, "the tensors end at 0");
  expect_error(file_bytes(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                          R"("a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})",
                          2),
               "key \"a\" stands twice");
}

TEST(Safetensors, RefusesEveryTruncation) {
  const Json header = {{"a", tensor("F32", {2}, 0, 8)}, {"b", tensor("BF16", {1, 2}, 8, 12)}};
  const std::string bytes = file_bytes(header.dump(), 12);
  EXPECT_NO_THROW(parse(bytes));
  for (size_t n = 0; n < bytes.size(); ++n) {
    const std::string cut = bytes.substr(0, n);
    EXPECT_THROW(parse(cut), Error) << n;
  }
}

TEST(Safetensors, RefusesWrongTensors) {
  const std::string bytes = file_bytes(Json{{"w", tensor("F32", {2, 3}, 0, 24)}}.dump(), 24);
  const SafetensorsFile file = parse(bytes);
  const auto expect = [&](const char* name, std::initializer_list<DType> dtypes, std::initializer_list<int64_t> shape,
                          const std::string& part) {
    try {
      file.require(name, dtypes, shape);
      ADD_FAILURE() << part;
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), ErrorCode::kCorruptFile);
      EXPECT_NE(std::string(e.what()).find(part), std::string::npos) << e.what();
    }
  };
  expect("v", {DType::kF32}, {2, 3}, "f.safetensors: tensor \"v\" is missing");
  expect("w", {DType::kBf16}, {2, 3}, "tensor \"w\" is F32[2, 3]; accepted: BF16 [2, 3]");
  expect("w", {DType::kF32, DType::kBf16}, {3, 2}, "is F32[2, 3]; accepted: F32 or BF16 [3, 2]");
  expect("w", {DType::kF32}, {2}, "accepted: F32 [2]");
  expect("w", {DType::kF32}, {2, 3, 1}, "accepted: F32 [2, 3, 1]");
}

TEST(Safetensors, MapsFiles) {
  const SafetensorsFile golden = SafetensorsFile::open(kModel + "/golden.safetensors");
  golden.will_need();
  const TensorRef* ids = golden.find("short.ids");
  ASSERT_NE(ids, nullptr);
  EXPECT_EQ(ids->values<int32_t>()[0], 0);
  EXPECT_THROW(SafetensorsFile::open(kModel + "/none.safetensors"), Error);
  EXPECT_THROW(SafetensorsFile::open(kModel), Error);
}

// ---- directories --------------------------------------------------------------------------------------------------

/// A directory of its own for each test.
class CheckpointDirectory : public testing::Test {
 protected:
  void SetUp() override {
    const auto* info = testing::UnitTest::GetInstance()->current_test_info();
    path_ = fs::path(testing::TempDir()) / ("gannet_checkpoint_" + std::string(info->name()));
    fs::remove_all(path_);
    fs::create_directories(path_);
    fs::copy_file(kModel + "/config.json", path_ / "config.json");
  }
  void TearDown() override { fs::remove_all(path_); }

  void write(const std::string& name, const std::string& bytes) const {
    std::ofstream(path_ / name, std::ios::binary) << bytes;
  }
  /// A file with one byte for each name.
  void write_shard(const std::string& name, const std::vector<std::string>& tensors) const {
    Json header = Json::object();
    for (size_t i = 0; i < tensors.size(); ++i) header[tensors[i]] = tensor("U8", {1}, i, i + 1);
    write(name, file_bytes(header.dump(), tensors.size()));
  }
  void write_index(const Json& map) const { write("model.safetensors.index.json", Json{{"weight_map", map}}.dump()); }

  void expect_refused(const std::string& part) const {
    try {
      Checkpoint::open(path_.string());
      ADD_FAILURE() << "accepted; expected: " << part;
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), ErrorCode::kCorruptFile);
      EXPECT_NE(std::string(e.what()).find(part), std::string::npos) << e.what();
    }
  }

  fs::path path_;
};

TEST_F(CheckpointDirectory, ReadsOneFile) {
  write_shard("model.safetensors", {"a", "b", "c"});
  Checkpoint checkpoint = Checkpoint::open(path_.string());
  EXPECT_EQ(checkpoint.names(), (std::vector<std::string>{"a", "b", "c"}));
  EXPECT_NE(checkpoint.find("b"), nullptr);
  EXPECT_EQ(checkpoint.find("d"), nullptr);
  EXPECT_EQ(checkpoint.unused(), (std::vector<std::string>{"a", "c"}));
  EXPECT_EQ(checkpoint.require("c", {DType::kU8}, {1}).num_bytes, 1);
  EXPECT_EQ(checkpoint.unused(), std::vector<std::string>{"a"});
  EXPECT_THROW(checkpoint.require("d", {DType::kU8}, {1}), Error);
  EXPECT_THROW(checkpoint.require("a", {DType::kF32}, {1}), Error);
}

TEST_F(CheckpointDirectory, ReadsShards) {
  write_shard("x.safetensors", {"a", "b"});
  write_shard("y.safetensors", {"c", "unlisted"});
  write_index({{"a", "x.safetensors"}, {"b", "x.safetensors"}, {"c", "y.safetensors"}});
  Checkpoint checkpoint = Checkpoint::open(path_.string());
  EXPECT_EQ(checkpoint.names().size(), 4u);
  EXPECT_EQ(checkpoint.find("c")->file, (path_ / "y.safetensors").string());
  EXPECT_EQ(checkpoint.unused(), (std::vector<std::string>{"a", "b", "unlisted"}));
}

TEST_F(CheckpointDirectory, RefusesMissingFiles) {
  expect_refused("has neither model.safetensors nor model.safetensors.index.json");
  write_index({{"a", "x.safetensors"}});
  expect_refused("names the shard \"x.safetensors\", which is missing");
  fs::remove(path_ / "config.json");
  expect_refused("config.json: cannot be opened");
  fs::remove_all(path_);
  expect_refused("is not a directory");
}

TEST_F(CheckpointDirectory, RefusesShardsThatContradictTheIndex) {
  write_shard("x.safetensors", {"a"});
  write_shard("y.safetensors", {"b"});
  write_index({{"a", "x.safetensors"}, {"c", "y.safetensors"}});
  expect_refused("places tensor \"c\" in \"y.safetensors\", which lacks it");
  write_index({{"a", "y.safetensors"}, {"b", "x.safetensors"}});
  expect_refused("places tensor \"a\" in \"y.safetensors\", which lacks it");
  write_shard("y.safetensors", {"a", "b"});
  write_index({{"a", "x.safetensors"}, {"b", "y.safetensors"}});
  expect_refused("tensor \"a\" stands in");
}

TEST_F(CheckpointDirectory, RefusesBadIndexes) {
  write_shard("x.safetensors", {"a"});
  write_index({{"a", "../x.safetensors"}});
  expect_refused("weight_map.a is \"../x.safetensors\"");
  write_index({{"a", "/etc/passwd"}});
  expect_refused("weight_map.a is");
  write_index({{"a", 5}});
  expect_refused("weight_map.a is 5");
  write_index(Json::object());
  expect_refused("weight_map is an object");
  write("model.safetensors.index.json", "{}");
  expect_refused("weight_map is missing");
  write("model.safetensors.index.json", "{");
  expect_refused("is not valid JSON");
}

TEST_F(CheckpointDirectory, RefusesTruncatedShards) {
  write("model.safetensors", "");
  expect_refused("model.safetensors: has 0 bytes");
  write("config.json", "");
  expect_refused("config.json: is not valid JSON");
}

TEST(Checkpoint, OpensTheRealOnes) {
  struct Case {
    std::string directory;
    size_t num_tensors;
    int64_t mapped_bytes;
  };
  for (const std::string& directory : {kModel, kCheckpoints + "v3-yarn", kCheckpoints + "v3-fp8",
                                       kCheckpoints + "v32-yarn", kCheckpoints + "glm5-shared-topk"}) {
    SCOPED_TRACE(directory);
    Checkpoint checkpoint = Checkpoint::open(directory);
    const gannet::ModelConfig& c = checkpoint.config();
    checkpoint.require("model.embed_tokens.weight", {DType::kF32, DType::kBf16}, {c.vocab_size, c.hidden_size});
    for (int64_t l = 0; l < c.num_hidden_layers(); ++l) {
      const std::string layer = "model.layers." + std::to_string(l);
      checkpoint.require(layer + ".self_attn.kv_a_proj_with_mqa.weight", {DType::kF32, DType::kBf16, DType::kE4m3},
                         {c.kv_lora_rank + c.qk_rope_head_dim, c.hidden_size});
      checkpoint.require(layer + ".self_attn.o_proj.weight", {DType::kF32, DType::kBf16, DType::kE4m3},
                         {c.hidden_size, c.num_attention_heads * c.v_head_dim});
      // Where the file has an indexer is where the configuration says so.
      EXPECT_EQ(checkpoint.find(layer + ".self_attn.indexer.wk.weight") != nullptr,
                c.is_dsa() && c.layers[static_cast<size_t>(l)].indexer);
      EXPECT_EQ(checkpoint.find(layer + ".mlp.gate.weight") != nullptr, c.layers[static_cast<size_t>(l)].moe);
    }
    EXPECT_FALSE(checkpoint.unused().empty());
    EXPECT_GT(checkpoint.mapped_bytes(), 1'000'000);
  }
}

}  // namespace
