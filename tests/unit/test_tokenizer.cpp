// The tokenizer: the table of worked examples, the golden prompts, streaming, and what is refused.
#include <gtest/gtest.h>

#include <chrono>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>
#include <sstream>

#include "gannet/error.h"
#include "model/safetensors.h"
#include "model/split_pattern.h"
#include "model/tokenizer.h"
#include "model/unicode.h"

namespace {

using gannet::EncodeOptions;
using gannet::Error;
using gannet::ErrorCode;
using gannet::Tokenizer;
using Json = nlohmann::json;
using Ids = std::vector<int32_t>;

const std::string kModel = std::string(GANNET_SOURCE_DIR) + "/models/tiny-dsv32";
constexpr const char* kBos = "<\uFF5Cbegin\u2581of\u2581sentence\uFF5C>";
constexpr const char* kEos = "<\uFF5Cend\u2581of\u2581sentence\uFF5C>";
constexpr const char* kReplacement = "\uFFFD";

std::string read_text(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

const Tokenizer& tiny() {
  static const Tokenizer tokenizer = Tokenizer::load(kModel);
  return tokenizer;
}

Ids encode_bare(const std::string& text) { return tiny().encode(text, {.add_bos = false}); }

TEST(Tokenizer, EncodesTheWorkedExamples) {
  const std::pair<std::string, Ids> cases[] = {
      {"a  b", {66, 222, 270}},
      {"a  123", {66, 1935, 18, 19, 20}},
      {"12345 6", {18, 19, 20, 21, 22, 222, 23}},
      {"don't", {69, 285, 470}},
      {"x\n\n  y", {89, 200, 200, 222, 310}},
      {" \n x", {222, 200, 222, 89}},
      {"\u4F60\u597Dabc", {162, 123, 256, 163, 100, 123, 425, 68}},
      {"\u00E9", {129, 104}},
      {"a\u180E"
       "b",
       {66, 159, 256, 238, 67}},
      {std::string(kEos) + "hi", {1, 73, 74}},
  };
  for (const auto& [text, ids] : cases) {
    EXPECT_EQ(encode_bare(text), ids) << text;
    EXPECT_EQ(tiny().decode(ids, {.skip_special = false}), text);
  }
}

TEST(Tokenizer, EncodesTheGoldenPrompts) {
  const Json golden = Json::parse(read_text(kModel + "/golden.json"));
  const auto tensors = gannet::SafetensorsFile::open(kModel + "/golden.safetensors");
  int compared = 0;
  for (const auto& [name, entry] : golden.items()) {
    ASSERT_TRUE(entry.contains("prompt")) << name;
    const gannet::TensorRef* ids = tensors.find(name + ".ids");
    ASSERT_NE(ids, nullptr) << name;
    const auto expected = ids->values<int32_t>();
    const auto prompt = entry["prompt"].get<std::string>();
    EXPECT_EQ(tiny().encode(prompt), Ids(expected.begin(), expected.end())) << name;
    EXPECT_EQ(tiny().decode(expected), prompt) << name;
    if (entry.contains("greedy_text")) {
      const auto greedy = entry["greedy_ids"].get<Ids>();
      EXPECT_EQ(tiny().decode(greedy), entry["greedy_text"].get<std::string>()) << name;
    }
    ++compared;
  }
  EXPECT_GE(compared, 4);
}

TEST(Tokenizer, AgreesWithTheReferenceLibrary) {
  const Json file = Json::parse(read_text(std::string(GANNET_SOURCE_DIR) + "/tests/data/tokenizer_reference.json"));
  ASSERT_GE(file["cases"].size(), 300u);
  for (const Json& c : file["cases"]) {
    const auto text = c["text"].get<std::string>();
    EXPECT_EQ(encode_bare(text), c["ids"].get<Ids>()) << c["text"];
    EXPECT_EQ(tiny().decode(c["ids"].get<Ids>(), {.skip_special = false}), text);
  }
}

TEST(Tokenizer, AddsBosOnceAndOnlyWhereAsked) {
  EXPECT_EQ(tiny().bos_id(), 0);
  EXPECT_EQ(tiny().encode("a"), (Ids{0, 66}));
  EXPECT_EQ(tiny().encode(""), Ids{0});
  EXPECT_EQ(encode_bare(""), Ids{});
  EXPECT_EQ(tiny().encode(std::string(kBos) + "a"), (Ids{0, 66}));
  const Tokenizer without = Tokenizer::parse(read_text(kModel + "/tokenizer.json"), "", "none");
  EXPECT_EQ(without.bos_id(), std::nullopt);
  EXPECT_EQ(without.encode("a"), Ids{66});
  const Tokenizer object =
      Tokenizer::parse(read_text(kModel + "/tokenizer.json"),
                       Json{{"add_bos_token", true}, {"bos_token", {{"content", kBos}}}}.dump(), "x");
  EXPECT_EQ(object.encode("a"), (Ids{0, 66}));
}

TEST(Tokenizer, ReadsSpecialTokensAsTextWhenTold) {
  const Ids ids = tiny().encode(std::string(kEos) + "hi", {.add_bos = false, .special_as_text = true});
  EXPECT_GT(ids.size(), 5u);
  for (const int32_t id : ids) EXPECT_FALSE(tiny().is_special(id));
  EXPECT_EQ(tiny().decode(ids), std::string(kEos) + "hi");
  // Spelled out, it is no BOS either.
  EXPECT_EQ(tiny().encode(kBos, {.special_as_text = true}).at(0), 0);
  EXPECT_GT(tiny().encode(kBos, {.special_as_text = true}).size(), 2u);
}

TEST(Tokenizer, SkipsSpecialTokensInDecoding) {
  EXPECT_EQ(tiny().decode(Ids{0, 73, 1, 74}), "hi");
  EXPECT_EQ(tiny().decode(Ids{73, 1, 74}, {.skip_special = false}), "h" + std::string(kEos) + "i");
  EXPECT_TRUE(tiny().is_special(0));
  EXPECT_FALSE(tiny().is_special(66));
  EXPECT_EQ(tiny().find(kEos), 1);
  EXPECT_EQ(tiny().find("no such token"), std::nullopt);
  EXPECT_EQ(tiny().vocab_size(), 2048);
}

TEST(Tokenizer, StreamsWholeCharactersOnly) {
  Tokenizer::Stream stream(tiny());
  EXPECT_EQ(stream.push(162), "");  // E4 BD A0, byte by byte
  EXPECT_EQ(stream.push(123), "");
  EXPECT_EQ(stream.push(256), "\u4F60");
  EXPECT_EQ(stream.push(162), "");
  EXPECT_EQ(stream.push(66), std::string(kReplacement) + "a");  // the tail can become nothing now
  EXPECT_EQ(stream.push(129), "");
  EXPECT_EQ(stream.finish(), kReplacement);
  EXPECT_EQ(stream.finish(), "");
  EXPECT_EQ(tiny().decode(Ids{5'000'000}), kReplacement);  // a padded vocabulary's id
  EXPECT_THROW(tiny().decode(Ids{-1}), Error);
}

TEST(Tokenizer, StreamsWhatDecodeReturns) {
  std::mt19937 random(7);
  for (int round = 0; round < 2000; ++round) {
    Ids ids(random() % 12);
    for (int32_t& id : ids) id = static_cast<int32_t>(random() % 260);  // mostly single bytes: mostly bad UTF-8
    Tokenizer::Stream stream(tiny());
    std::string text;
    for (const int32_t id : ids) {
      text += stream.push(id);
      EXPECT_EQ(gannet::find_invalid_utf8(text), std::string::npos);
    }
    text += stream.finish();
    EXPECT_EQ(text, tiny().decode(ids));
  }
}

/// A random text of the characters that the patterns tell apart.
std::string random_text(std::mt19937& random, size_t length) {
  static const char32_t kAlphabet[] = {U'a', U'b',   U'Z',   U' ',   U' ',    U'\n', U'\r',  U'\t',  U'1',
                                       U'9', U'\'',  U'.',   U'<',   0x301,   0xE9,  0x4F60, 0x3042, 0x30FC,
                                       0xA0, 0x2003, 0x3000, 0x180E, 0x1F600, 0x660, 0x20AC, 0x200B, 0x0};
  std::string text;
  for (size_t i = 0; i < length; ++i) gannet::append_utf8(&text, kAlphabet[random() % std::size(kAlphabet)]);
  return text;
}

TEST(Tokenizer, DecodesWhatItEncodes) {
  std::mt19937 random(1);
  for (int round = 0; round < 3000; ++round) {
    const std::string text = random_text(random, random() % 40);
    EXPECT_EQ(tiny().decode(encode_bare(text)), text);
  }
}

/// The definition, word for word: merge the pair of lowest rank, leftmost among equals, until none is left.
Ids merge_naively(Ids ids, const std::map<std::pair<int32_t, int32_t>, std::pair<int, int32_t>>& merges) {
  while (true) {
    size_t best = 0;
    int best_rank = std::numeric_limits<int>::max();
    for (size_t i = 0; i + 1 < ids.size(); ++i) {
      const auto it = merges.find({ids[i], ids[i + 1]});
      if (it != merges.end() && it->second.first < best_rank) best_rank = it->second.first, best = i;
    }
    if (best_rank == std::numeric_limits<int>::max()) return ids;
    ids[best] = merges.at({ids[best], ids[best + 1]}).second;
    ids.erase(ids.begin() + static_cast<long>(best) + 1);
  }
}

TEST(Tokenizer, MergesAsTheDefinitionSays) {
  const Json file = Json::parse(read_text(kModel + "/tokenizer.json"));
  const Json& vocab = file["model"]["vocab"];
  std::map<std::pair<int32_t, int32_t>, std::pair<int, int32_t>> merges;
  int rank = 0;
  for (const Json& m : file["model"]["merges"]) {
    const auto a = m[0].get<std::string>();
    const auto b = m[1].get<std::string>();
    merges[{vocab[a].get<int32_t>(), vocab[b].get<int32_t>()}] = {rank++, vocab[a + b].get<int32_t>()};
  }
  std::mt19937 random(3);
  const std::string letters = "etaoinshrdlu";
  for (int round = 0; round < 2000; ++round) {
    std::string text;  // letters alone: one piece
    Ids bytes;
    for (size_t i = 0, n = 1 + random() % 30; i < n; ++i) {
      text += letters[random() % letters.size()];
      bytes.push_back(vocab[std::string(1, text.back())].get<int32_t>());
    }
    EXPECT_EQ(encode_bare(text), merge_naively(bytes, merges)) << text;
  }
}

TEST(Tokenizer, TakesTheFirstOfEqualPairs) {
  // "aaa" is [aa][a], never [a][aa]; "aaaaa" then merges the two [aa] first.
  const Json file = {
      {"model", {{"type", "BPE"}, {"vocab", {{"a", 0}, {"aa", 1}, {"aaaa", 2}}}, {"merges", {"a a", "aa aa"}}}},
      {"pre_tokenizer", {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}}}};
  const Tokenizer t = Tokenizer::parse(file.dump(), "", "x");
  EXPECT_EQ(t.encode("aaa"), (Ids{1, 0}));
  EXPECT_EQ(t.encode("aaaaa"), (Ids{2, 0}));
  EXPECT_EQ(t.encode("aaaaaaa"), (Ids{2, 1, 0}));
  EXPECT_THROW(t.encode("b"), Error);  // no token for that byte: refused, not dropped
}

/// A tokenizer file of 256 bytes and some merges, for tests that change one thing about it.
Json small_file() {
  Json vocab = Json::object();
  int id = 0;
  char32_t next = 0x100;
  for (char32_t b = 0; b < 256; ++b) {
    const bool itself = (b >= 0x21 && b <= 0x7E) || (b >= 0xA1 && b <= 0xAC) || b >= 0xAE;
    std::string token;
    gannet::append_utf8(&token, itself ? b : next++);
    vocab[token] = id++;
  }
  vocab["th"] = 256;
  vocab["the"] = 257;
  vocab["abc"] = 258;
  const Json split = {
      {"type", "Split"}, {"pattern", {{"Regex", "\\s+|[a-z]+"}}}, {"behavior", "Isolated"}, {"invert", false}};
  const Json level = {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}, {"use_regex", false}};
  return {{"added_tokens", Json::array()},
          {"normalizer", nullptr},
          {"pre_tokenizer", {{"type", "Sequence"}, {"pretokenizers", {split, level}}}},
          {"post_processor", nullptr},
          {"model",
           {{"type", "BPE"},
            {"vocab", vocab},
            {"merges", Json::array({Json::array({"t", "h"}), Json::array({"th", "e"})})}}}};
}

Json added(const std::string& text, int id, bool special = true) {
  return {{"id", id},        {"content", text},     {"single_word", false}, {"lstrip", false},
          {"rstrip", false}, {"normalized", false}, {"special", special}};
}

Ids encode_with(const Json& file, const std::string& text, const EncodeOptions& options = {}) {
  return Tokenizer::parse(file.dump(), "", "x").encode(text, options);
}

TEST(Tokenizer, ReadsMergesInBothForms) {
  Json file = small_file();
  EXPECT_EQ(encode_with(file, "the"), Ids{257});
  file["model"]["merges"] = {"t h", "th e"};
  EXPECT_EQ(encode_with(file, "the"), Ids{257});
}

TEST(Tokenizer, HonoursIgnoreMerges) {
  Json file = small_file();
  EXPECT_EQ(encode_with(file, "abc"), (Ids{97, 98, 99}));
  file["model"]["ignore_merges"] = true;
  EXPECT_EQ(encode_with(file, "abc"), Ids{258});
  EXPECT_EQ(encode_with(file, "abcd"), (Ids{97, 98, 99, 100}));
}

TEST(Tokenizer, CutsTheLongestAddedToken) {
  Json file = small_file();
  file["added_tokens"] = {added("<a", 300), added("<a>", 301), added("<a>b", 302), added("<think>", 303, false)};
  EXPECT_EQ(encode_with(file, "<a>b"), Ids{302});
  EXPECT_EQ(encode_with(file, "<a>c"), (Ids{301, 99}));
  EXPECT_EQ(encode_with(file, "<a"), Ids{300});
  EXPECT_EQ(encode_with(file, "<"), Ids{60});
  EXPECT_EQ(encode_with(file, "x<think><a"), (Ids{120, 303, 300}));
  // Only special tokens become text; others are part of the vocabulary.
  EXPECT_EQ(encode_with(file, "<a<think>", {.special_as_text = true}), (Ids{60, 97, 303}));
}

TEST(Tokenizer, ReadsATemplate) {
  Json file = small_file();
  file["added_tokens"] = {added("<s>", 300), added("[g]", 301)};
  const Json sequence = {{"Sequence", {{"id", "A"}, {"type_id", 0}}}};
  const auto special = [](const char* id) { return Json{{"SpecialToken", {{"id", id}, {"type_id", 0}}}}; };
  const auto with = [&](const Json& single) {
    file["post_processor"] = {{"type", "TemplateProcessing"}, {"single", single}};
    return encode_with(file, "the");
  };
  EXPECT_EQ(with({special("<s>"), sequence}), (Ids{300, 257}));
  EXPECT_EQ(with({special("[g]"), special("<s>"), sequence}), (Ids{301, 300, 257}));
  EXPECT_EQ(with(Json::array({sequence})), Ids{257});
  EXPECT_THROW(with({sequence, special("<s>")}), Error);
  EXPECT_THROW(with({special("<none>"), sequence}), Error);
}

// ---- what is refused ----------------------------------------------------------------------------------------------

void expect_error(const Json& file, const std::string& part, const std::string& config = "") {
  try {
    Tokenizer::parse(file.dump(), config, "dir");
    ADD_FAILURE() << "accepted; expected: " << part;
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find(part), std::string::npos) << e.what();
    EXPECT_EQ(std::string(e.what()).find('\n'), std::string::npos) << e.what();
    EXPECT_TRUE(e.code() == ErrorCode::kCorruptFile || e.code() == ErrorCode::kUnsupported) << e.what();
  }
}

TEST(Tokenizer, RefusesWhatIsNotImplemented) {
  const auto with = [](const char* pointer, const Json& value, const std::string& part) {
    Json file = small_file();
    file[Json::json_pointer(pointer)] = value;
    SCOPED_TRACE(pointer);
    expect_error(file, part);
  };
  with("/model/type", "Unigram", "model.type is \"Unigram\"");
  with("/model/dropout", 0.1, "model.dropout is 0.1");
  with("/model/unk_token", "<unk>", "model.unk_token");
  with("/model/byte_fallback", true, "model.byte_fallback is true");
  with("/model/continuing_subword_prefix", "##", "model.continuing_subword_prefix");
  with("/normalizer", Json{{"type", "NFC"}}, "normalizer.type is \"NFC\"");
  with("/truncation", Json{{"max_length", 5}}, "truncation");
  with("/decoder", Json{{"type", "Fuse"}}, "decoder.type is \"Fuse\"");
  with("/pre_tokenizer/type", "Whitespace", "pre_tokenizer.type is \"Whitespace\"");
  with("/pre_tokenizer/pretokenizers/0/behavior", "Removed", "behavior is \"Removed\"");
  with("/pre_tokenizer/pretokenizers/0/invert", true, "invert is true");
  with("/pre_tokenizer/pretokenizers/0/pattern/Regex", "(", "pattern");
  with("/pre_tokenizer/pretokenizers/0/pattern/Regex", "\\w+", "\\\\w");
  with("/pre_tokenizer/pretokenizers/0/pattern/Regex", "[a&&[b]]", "intersection");
  with("/pre_tokenizer/pretokenizers/1/add_prefix_space", true, "add_prefix_space is true");
  with("/pre_tokenizer/pretokenizers/1/use_regex", true, "use_regex is true");
  with("/post_processor", Json{{"type", "BertProcessing"}}, "post_processor.type");
  for (const char* key : {"lstrip", "rstrip", "single_word"}) {
    Json token = added("<s>", 300);
    token[key] = true;
    with("/added_tokens", Json::array({token}), std::string("added_tokens[0].") + key);
  }
  expect_error(small_file(), "add_eos_token is true", "{\"add_eos_token\": true}");
}

TEST(Tokenizer, RefusesFilesThatContradictThemselves) {
  const auto with = [](const char* pointer, const Json& value, const std::string& part) {
    Json file = small_file();
    file[Json::json_pointer(pointer)] = value;
    SCOPED_TRACE(pointer);
    expect_error(file, part);
  };
  with("/model/vocab/th", 257, "to two tokens");
  with("/model/vocab/th", -1, "model.vocab.th is -1");
  with("/model/vocab/th", "x", "model.vocab.th is \"x\"");
  with("/model/merges/0", "t", "model.merges[0]");
  with("/model/merges/0", "t h e", "model.merges[0]");
  with("/model/merges/0", Json::array({"t", "q"}), "\"tq\"");
  with("/model/merges/1", Json::array({"t", "h"}), "model.merges[1] repeats");
  with("/added_tokens", Json::array({added("<s>", 5)}), "added_tokens[0].id is 5");
  with("/added_tokens", Json::array({added("the", 300)}), "added_tokens[0].id is 300");
  with("/added_tokens", Json::array({added("", 300)}), "added_tokens[0].content");
  with("/added_tokens", Json::array({added("<s>", 300), added("<s>", 300)}), "added_tokens[1].content");
  expect_error(small_file(), "bos_token names \"<s>\"", R"({"add_bos_token": true, "bos_token": "<s>"})");
  expect_error(small_file(), "bos_token is missing", R"({"add_bos_token": true})");
  EXPECT_THROW(Tokenizer::parse("", "", "x"), Error);
  EXPECT_THROW(Tokenizer::parse("{\"model\": ", "", "x"), Error);
  EXPECT_THROW(Tokenizer::parse("[]", "", "x"), Error);
  EXPECT_THROW(Tokenizer::load(kModel + "/no-such-directory"), Error);
}

TEST(Tokenizer, RefusesTextThatIsNotUtf8) {
  for (const std::string& bad : {std::string("ab\xFF"), std::string("ab\xC0\xAF"), std::string("ab\xED\xA0\x80"),
                                 std::string("ab\xF4\x90\x80\x80"), std::string("ab\xE4\xBD")}) {
    try {
      encode_bare(bad);
      ADD_FAILURE() << "accepted";
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), ErrorCode::kInvalidArgument);
      EXPECT_NE(std::string(e.what()).find("offset 2"), std::string::npos) << e.what();
    }
  }
}

// ---- patterns -----------------------------------------------------------------------------------------------------

TEST(SplitPattern, KnowsWhiteSpace) {
  // The property White_Space, from PropList.txt; PCRE2's own \s has U+180E too.
  const std::set<char32_t> spaces = {0x9,    0xA,    0xB,    0xC,    0xD,    0x20,   0x85,   0xA0,   0x1680,
                                     0x2000, 0x2001, 0x2002, 0x2003, 0x2004, 0x2005, 0x2006, 0x2007, 0x2008,
                                     0x2009, 0x200A, 0x2028, 0x2029, 0x202F, 0x205F, 0x3000};
  // Only a match of all four is split off from the letter in front.
  const auto space = gannet::SplitPattern::regex("x|(?:\\s[\\s][^\\S])", "x");
  const auto other = gannet::SplitPattern::regex("x|(?:\\S[\\S][^\\s])", "x");
  gannet::SplitPattern::Scratch scratch;
  for (char32_t c = 0; c <= 0x10FFFF; c += c < 0x4000 ? 1 : 97) {
    if ((c >= 0xD800 && c <= 0xDFFF) || c == U'x') continue;
    std::string one;
    gannet::append_utf8(&one, c);
    const std::string text = one + one + one + "x" + one + one + one;
    for (const auto* pattern : {&space, &other}) {
      std::vector<gannet::Piece> pieces;
      pattern->split(text + one, {0, text.size() + one.size()}, scratch, &pieces);
      const bool matches = spaces.contains(c) == (pattern == &space);
      // Matching: ccc x ccc c. Else: ccc x cccc.
      EXPECT_EQ(pieces.size(), matches ? 4u : 3u) << std::hex << static_cast<uint32_t>(c);
    }
  }
}

TEST(SplitPattern, SkipsEmptyMatches) {
  const auto pattern = gannet::SplitPattern::regex("b*", "x");
  gannet::SplitPattern::Scratch scratch;
  std::vector<gannet::Piece> pieces;
  pattern.split("\u00E9abba", {0, 6}, scratch, &pieces);
  ASSERT_EQ(pieces.size(), 3u);
  EXPECT_EQ(pieces[1].begin, 3u);
  EXPECT_EQ(pieces[1].end, 5u);
}

TEST(SplitPattern, LooksAtThePieceOnly) {
  const auto pattern = gannet::SplitPattern::regex("a(?!b)", "x");
  gannet::SplitPattern::Scratch scratch;
  std::vector<gannet::Piece> pieces;
  pattern.split("xabx", {0, 2}, scratch, &pieces);
  EXPECT_EQ(pieces.size(), 2u);
  pieces.clear();
  pattern.split("xabx", {0, 4}, scratch, &pieces);
  EXPECT_EQ(pieces.size(), 1u);
}

TEST(SplitPattern, RefusesWhatTheTwoEnginesReadDifferently) {
  for (const char* bad :
       {"\\w",    "\\b",  "\\h",  "\\R",         "\\X",     "\\K",  "\\G",   "\\A",   "\\z",   "\\x41",
        "\\1",    "^a",   "a$",   "[[:alpha:]]", "[a[b]]",  "[]a]", "a{,3}", "a{2}+", "a{",    "(?<n>a)",
        "(?m:a)", "(?R)", "(?C)", "(*FAIL)",     "(*UTF)a", "\\",   "[a",    "\\pL",  "\\p{L", "(?#x)a"})
    EXPECT_THROW(gannet::SplitPattern::regex(bad, "x"), Error) << bad;
  for (const char* good : {"a", "(?i:'s|'t)", "[^\\r\\n\\p{L}\\p{N}]?\\p{L}+", "\\p{N}{1,3}", "\\s+(?!\\S)", "a++b",
                           "[\\-\\]\\\\]", "(?<=a)b", "x{2,}", "\\d\\D", "[^\\s\\p{L}]+", "(a)(b)"})
    EXPECT_NO_THROW(gannet::SplitPattern::regex(good, "x")) << good;
}

TEST(SplitPattern, StopsPatternsThatExplode) {
  const auto pattern = gannet::SplitPattern::regex("(?:a+)+b", "x");
  gannet::SplitPattern::Scratch scratch;
  std::vector<gannet::Piece> pieces;
  const std::string text(60, 'a');
  // PCRE2 may prove that no b is there; a text with a b behind a barrier takes that way out.
  const std::string barrier = text + "cb";
  EXPECT_THROW(pattern.split(barrier, {0, barrier.size()}, scratch, &pieces), Error);
}

// ---- time ---------------------------------------------------------------------------------------------------------

double seconds_to_encode(const std::string& text) {
  const auto start = std::chrono::steady_clock::now();
  const Ids ids = encode_bare(text);
  const std::chrono::duration<double> t = std::chrono::steady_clock::now() - start;
  EXPECT_EQ(tiny().decode(ids), text);
  return t.count();
}

TEST(Tokenizer, TakesNearLinearTime) {
  // Each text would be one piece of 1 MB or a run that a pattern walks through; quadratic work would take hours.
  constexpr size_t kBytes = 1'000'000;
  const auto repeat = [](const std::string& unit) {
    std::string text;
    while (text.size() < kBytes) text += unit;
    return text;
  };
  for (const std::string& text :
       {repeat(" "), repeat(" ") + "x", repeat("\n"), repeat(" \n") + " x", repeat("a"), repeat("the"), repeat("1"),
        repeat("<"), repeat("\u4F60"), repeat("."), repeat("e "), repeat("\u0301"), repeat(" .")}) {
    const double seconds = seconds_to_encode(text);
    EXPECT_LT(seconds, 20.0) << text.substr(0, 10);
    std::printf("%10.3f s for %zu bytes of %s\n", seconds, text.size(),
                Json(text.substr(0, 6)).dump(-1, ' ', true, Json::error_handler_t::replace).c_str());
  }
}

// ---- UTF-8 --------------------------------------------------------------------------------------------------------

TEST(Unicode, StepsThroughEveryCodePoint) {
  for (char32_t c = 0; c <= 0x10FFFF; ++c) {
    if (c >= 0xD800 && c <= 0xDFFF) continue;
    std::string text;
    gannet::append_utf8(&text, c);
    const gannet::Utf8Step step = gannet::utf8_step(text, 0);
    ASSERT_TRUE(step.valid && step.length == text.size() && step.code_point == c) << static_cast<uint32_t>(c);
    for (size_t n = 1; n < text.size(); ++n) {
      const gannet::Utf8Step cut = gannet::utf8_step(std::string_view(text).substr(0, n), 0);
      ASSERT_TRUE(!cut.valid && cut.incomplete && cut.length == n);
    }
  }
}

TEST(Unicode, ReplacesMaximalSubparts) {
  // The example of the Unicode standard, table 3-8.
  const std::string text = "\x61\xF1\x80\x80\xE1\x80\xC2\x62\x80\x63\x80\xBF\x64";
  std::vector<size_t> lengths;
  for (size_t i = 0; i < text.size(); i += lengths.back()) lengths.push_back(gannet::utf8_step(text, i).length);
  EXPECT_EQ(lengths, (std::vector<size_t>{1, 3, 2, 1, 1, 1, 1, 1, 1, 1}));
  EXPECT_EQ(gannet::find_invalid_utf8(text), 1u);
  EXPECT_EQ(gannet::find_invalid_utf8("\xED\xA0\x80"), 0u);  // a surrogate
  EXPECT_EQ(gannet::find_invalid_utf8("a\xC0\x80"), 1u);     // overlong
}

}  // namespace
