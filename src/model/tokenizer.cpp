#include "model/tokenizer.h"

#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <queue>
#include <unordered_map>
#include <unordered_set>

#include "model/json_file.h"
#include "model/split_pattern.h"
#include "model/unicode.h"

namespace gannet {
inline namespace v0 {
namespace {

constexpr const char* kFunction = "tokenizer";
constexpr const char* kTokenizerFile = "tokenizer.json";
constexpr const char* kConfigFile = "tokenizer_config.json";
constexpr int64_t kMaxFileBytes = 256'000'000;  // Kimi-K2's vocabulary of 163,840 takes 15 MB
constexpr int64_t kMaxTokenId = (int64_t{1} << 31) - 2;
constexpr const char* kReplacement = "\xEF\xBF\xBD";  // U+FFFD

// ---- bytes as characters ----------------------------------------------------------------------------------------

/// The character that stands for each byte: printable ones for themselves, the other 68 for U+0100 and up, in order.
std::array<char32_t, 256> make_byte_characters() {
  std::array<char32_t, 256> characters{};
  char32_t next = 0x100;
  for (char32_t b = 0; b < 256; ++b) {
    const bool itself = (b >= 0x21 && b <= 0x7E) || (b >= 0xA1 && b <= 0xAC) || b >= 0xAE;
    characters[b] = itself ? b : next++;
  }
  return characters;
}

/// The bytes that a token of the vocabulary spells; nullopt if it has a character that stands for none.
std::optional<std::string> token_bytes(std::string_view token, const std::unordered_map<char32_t, char>& byte_of) {
  std::string bytes;
  for (size_t i = 0; i < token.size();) {
    const Utf8Step step = utf8_step(token, i);
    const auto it = byte_of.find(step.code_point);
    if (!step.valid || it == byte_of.end()) return std::nullopt;
    bytes.push_back(it->second);
    i += step.length;
  }
  return bytes;
}

/// Appends `bytes` as text: all of it if `final`, else up to an incomplete tail. Returns how many bytes were taken.
size_t append_text(std::string* text, std::string_view bytes, bool final) {
  size_t i = 0;
  while (i < bytes.size()) {
    const Utf8Step step = utf8_step(bytes, i);
    if (step.incomplete && !final) break;
    if (step.valid) text->append(bytes.substr(i, step.length));
    else text->append(kReplacement);
    i += step.length;
  }
  return i;
}

// ---- added tokens -----------------------------------------------------------------------------------------------

struct AddedToken {
  std::string text;
  int32_t id;
  bool special;
};

/// Finds the leftmost, then longest of a set of texts.
class AddedTokens {
 public:
  void add(AddedToken token) {
    const auto at = std::lower_bound(tokens_.begin(), tokens_.end(), token,
                                     [](const AddedToken& a, const AddedToken& b) { return a.text < b.text; });
    begins_[static_cast<unsigned char>(token.text[0])] = true;
    tokens_.insert(at, std::move(token));
  }

  /// The longest token at `position`, or nullptr.
  const AddedToken* match(std::string_view text, size_t position) const {
    if (!begins_[static_cast<unsigned char>(text[position])]) return nullptr;
    // The tokens that share the first n bytes with the text are a range of the sorted list; it narrows byte by byte.
    const AddedToken* longest = nullptr;
    auto low = tokens_.begin();
    auto high = tokens_.end();
    for (size_t n = 0; position + n < text.size() && low != high; ++n) {
      const auto byte = static_cast<unsigned char>(text[position + n]);
      const auto at = [n](const AddedToken& t) { return static_cast<unsigned char>(t.text[n]); };
      low = std::partition_point(low, high, [&](const AddedToken& t) { return at(t) < byte; });
      high = std::partition_point(low, high, [&](const AddedToken& t) { return at(t) <= byte; });
      if (low != high && low->text.size() == n + 1) {  // sorted: a prefix of the others comes first
        longest = &*low;
        ++low;
      }
    }
    return longest;
  }

 private:
  std::vector<AddedToken> tokens_;
  std::array<bool, 256> begins_{};
};

// ---- merging ----------------------------------------------------------------------------------------------------

struct Merge {
  int32_t rank;
  int32_t id;  // of the joined token
};

uint64_t pair_key(int32_t a, int32_t b) {
  return (static_cast<uint64_t>(static_cast<uint32_t>(a)) << 32) | static_cast<uint32_t>(b);
}

/// Splitmix64's finaliser: the keys are two small numbers in one, which the identity would send to few buckets.
struct PairHash {
  size_t operator()(uint64_t x) const noexcept {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return static_cast<size_t>(x ^ (x >> 31));
  }
};
using Merges = std::unordered_map<uint64_t, Merge, PairHash>;

/// Merges one piece: the pair of lowest rank first, the leftmost among equals. A heap over a linked list of symbols
/// takes n log n steps for n bytes, where scanning for the best pair after each merge would take n^2: a page of one
/// repeated letter is a single piece.
class Merger {
 public:
  explicit Merger(const Merges& merges) : merges_(merges) {}

  /// `symbols` are the ids of the single bytes; appends the ids of the merged tokens.
  void run(std::span<const int32_t> symbols, std::vector<int32_t>* ids) {
    const auto n = static_cast<int64_t>(symbols.size());
    nodes_.clear();
    for (int64_t i = 0; i < n; ++i) nodes_.push_back({symbols[static_cast<size_t>(i)], i - 1, i + 1 < n ? i + 1 : -1});
    heap_.clear();
    for (int64_t i = 0; i + 1 < n; ++i) consider(i);
    std::make_heap(heap_.begin(), heap_.end());
    heaped_ = true;
    while (!heap_.empty()) {
      std::pop_heap(heap_.begin(), heap_.end());
      const Candidate best = heap_.back();
      heap_.pop_back();
      Node& left = node(best.position);
      // The pair may have been broken up, or be another pair by now.
      if (left.id < 0 || left.next < 0 || pair_key(left.id, node(left.next).id) != best.pair) continue;
      Node& right = node(left.next);
      left.id = best.id;
      left.next = right.next;
      right.id = -1;
      if (left.next >= 0) node(left.next).previous = best.position;
      if (left.previous >= 0) consider(left.previous);
      if (left.next >= 0) consider(best.position);
    }
    heaped_ = false;
    for (int64_t i = n > 0 ? 0 : -1; i >= 0; i = node(i).next) ids->push_back(node(i).id);
  }

 private:
  struct Node {
    int32_t id;  // -1: merged into its left neighbour
    int64_t previous;
    int64_t next;
  };
  struct Candidate {
    int32_t rank;
    int32_t id;
    int64_t position;
    uint64_t pair;
    /// The standard heap keeps the largest in front: lowest rank, then leftmost.
    bool operator<(const Candidate& o) const { return std::tie(o.rank, o.position) < std::tie(rank, position); }
  };

  Node& node(int64_t i) { return nodes_[static_cast<size_t>(i)]; }

  void consider(int64_t position) {
    const uint64_t pair = pair_key(node(position).id, node(node(position).next).id);
    const auto it = merges_.find(pair);
    if (it == merges_.end()) return;
    heap_.push_back({it->second.rank, it->second.id, position, pair});
    if (heaped_) std::push_heap(heap_.begin(), heap_.end());
  }

  const Merges& merges_;
  std::vector<Node> nodes_;
  std::vector<Candidate> heap_;
  bool heaped_ = false;
};

}  // namespace

// ---- the tokenizer ----------------------------------------------------------------------------------------------

struct Tokenizer::State {
  struct Token {
    std::string bytes;  // what it decodes to
    bool special = false;
  };

  std::string name;
  std::unordered_map<std::string, int32_t> ids;  // by spelling in the file
  std::unordered_map<int32_t, Token> tokens;
  std::unordered_map<std::string, int32_t> whole_pieces;  // by bytes; only with ignore_merges
  std::array<int32_t, 256> byte_ids{};                    // -1: no token
  Merges merges;
  bool ignore_merges = false;
  // Added tokens are cut out in two passes, as the reference does: those that are matched before normalisation first.
  // Both kinds with special ones and without.
  AddedTokens first_all, first_plain, second_all, second_plain;
  std::vector<SplitPattern> splits;
  std::vector<int32_t> prefix;
  int64_t vocab_size = 0;

  void load(const Json& json, const std::string& file);
  void load_model(const JsonObject& model);
  void load_added(const JsonObject& root);
  void load_pre_tokenizer(const JsonObject& p, bool last);
  void load_post_processor(const JsonObject& p);
  void load_config(const Json& json, const std::string& file);
  void put(int32_t id, std::string bytes, bool special);
  int32_t id_of(const JsonObject& o, std::string_view key, const std::string& text) const;
};

namespace {

/// Throws unless `key` is absent, null, false, 0 or "".
void require_nothing(const JsonObject& o, std::string_view key) {
  const Json* value = o.find(key);
  if (value == nullptr || *value == false || *value == "") return;
  if (value->is_number() && value->get<double>() == 0.0) return;
  o.unsupported(key, "null, or absent");
}

/// A normalizer that changes nothing.
void check_normalizer(const JsonObject& root) {
  if (!root.given("normalizer")) return;
  const JsonObject n = root.object("normalizer");
  if (n.string("type") != "Sequence") n.unsupported("type", "null for the normalizer, or an empty Sequence");
  if (!n.array("normalizers").empty()) n.unsupported("normalizers", "an empty array");
}

}  // namespace

void Tokenizer::State::put(int32_t id, std::string bytes, bool special) {
  tokens[id] = {std::move(bytes), special};
  vocab_size = std::max(vocab_size, int64_t{id} + 1);
}

int32_t Tokenizer::State::id_of(const JsonObject& o, std::string_view key, const std::string& text) const {
  const auto it = ids.find(text);
  if (it == ids.end())
    fail(ErrorCode::kCorruptFile, kFunction, "{}: {} names {}, which is no token", o.file(), o.field(key),
         show_text(text));
  return it->second;
}

void Tokenizer::State::load_model(const JsonObject& model) {
  if (model.string_or("type", "BPE") != "BPE") model.unsupported("type", "\"BPE\"");
  for (const char* key :
       {"dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk", "byte_fallback"})
    require_nothing(model, key);
  ignore_merges = model.boolean_or("ignore_merges", false);

  const std::array<char32_t, 256> characters = make_byte_characters();
  std::unordered_map<char32_t, char> byte_of;
  for (size_t b = 0; b < 256; ++b) byte_of[characters[b]] = static_cast<char>(static_cast<uint8_t>(b));

  byte_ids.fill(-1);
  const JsonObject vocab = model.object("vocab");
  for (const auto& [token, value] : vocab.json().items()) {
    const auto id = static_cast<int32_t>(vocab.integer(token, 0, kMaxTokenId));
    if (tokens.contains(id))
      fail(ErrorCode::kCorruptFile, kFunction, "{}: {} gives the id {} to two tokens, one of them {}", vocab.file(),
           model.field("vocab"), id, show_text(token));
    ids[token] = id;
    const std::optional<std::string> bytes = token_bytes(token, byte_of);
    // A token with other characters can come from no text; it decodes to its own spelling.
    put(id, bytes ? *bytes : token, false);
    if (!bytes) continue;
    if (bytes->size() == 1) byte_ids[static_cast<unsigned char>((*bytes)[0])] = id;
    if (ignore_merges) whole_pieces[*bytes] = id;
  }

  const std::vector<Json>& list = model.array("merges");
  merges.reserve(list.size());
  for (size_t rank = 0; rank < list.size(); ++rank) {
    const Json& entry = list[rank];
    std::string a;
    std::string b;
    if (entry.is_array() && entry.size() == 2 && entry[0].is_string() && entry[1].is_string()) {
      a = entry[0].get<std::string>();
      b = entry[1].get<std::string>();
    } else if (entry.is_string()) {  // the older form, "a b": a space itself is spelled U+0120
      const auto& text = entry.get_ref<const std::string&>();
      const size_t space = text.find(' ');
      if (space != std::string::npos && text.find(' ', space + 1) == std::string::npos) {
        a = text.substr(0, space);
        b = text.substr(space + 1);
      }
    }
    const auto refuse = [&](std::string_view why) {
      fail(ErrorCode::kCorruptFile, kFunction, "{}: {}[{}] {}", model.file(), model.field("merges"), rank, why);
    };
    if (a.empty() || b.empty()) refuse(fmt::format("is {}; accepted: [\"a\", \"b\"] or \"a b\"", show(entry)));
    for (const std::string& part : {a, b, a + b})
      if (!ids.contains(part)) refuse(fmt::format("needs {}, which is not in the vocabulary", show_text(part)));
    const Merge merge{static_cast<int32_t>(rank), ids[a + b]};
    if (!merges.try_emplace(pair_key(ids[a], ids[b]), merge).second)
      refuse(fmt::format("repeats the merge of {} and {}", show_text(a), show_text(b)));
  }
}

void Tokenizer::State::load_added(const JsonObject& root) {
  if (!root.given("added_tokens")) return;
  const std::vector<Json>& list = root.array("added_tokens");
  std::unordered_set<std::string> seen;
  for (size_t i = 0; i < list.size(); ++i) {
    const JsonObject t(kFunction, root.file(), fmt::format("added_tokens[{}]", i), list[i]);
    AddedToken token{t.string("content"), static_cast<int32_t>(t.integer("id", 0, kMaxTokenId)),
                     t.boolean_or("special", false)};
    if (token.text.empty()) t.refuse("content", "a text");
    for (const char* key : {"single_word", "lstrip", "rstrip"}) require_nothing(t, key);
    if (const auto it = ids.find(token.text); it != ids.end() && it->second != token.id)
      t.refuse("id", fmt::format("{}, the id of {} in the vocabulary", it->second, show_text(token.text)));
    if (tokens.contains(token.id) && !ids.contains(token.text))
      t.refuse("id", fmt::format("an id that no other token has, for {}", show_text(token.text)));
    if (!seen.insert(token.text).second) t.refuse("content", "a text that no added token before has");
    ids[token.text] = token.id;
    put(token.id, token.text, token.special);
    const bool second = t.boolean_or("normalized", !token.special);
    if (!token.special) (second ? second_plain : first_plain).add(token);
    (second ? second_all : first_all).add(std::move(token));
  }
}

void Tokenizer::State::load_pre_tokenizer(const JsonObject& p, bool last) {
  const std::string type = p.string("type");
  if (type == "Sequence") {
    const std::vector<Json>& list = p.array("pretokenizers");
    if (list.empty()) p.refuse("pretokenizers", "an array that ends with a ByteLevel");
    for (size_t i = 0; i < list.size(); ++i) {
      const JsonObject step(kFunction, p.file(), p.field(fmt::format("pretokenizers[{}]", i)), list[i]);
      if (step.string("type") == "Sequence") step.unsupported("type", "\"Split\" or \"ByteLevel\"");
      load_pre_tokenizer(step, i + 1 == list.size());
    }
  } else if (type == "Split" && !last) {
    if (p.string("behavior") != "Isolated") p.unsupported("behavior", "\"Isolated\"");
    require_nothing(p, "invert");
    const JsonObject pattern = p.object("pattern");
    if (pattern.given("Regex") == pattern.given("String")) p.refuse("pattern", "{\"Regex\": ...} or {\"String\": ...}");
    const char* kind = pattern.given("Regex") ? "Regex" : "String";
    const std::string text = pattern.string(kind);
    if (text.empty()) pattern.refuse(kind, "a text that is not empty");
    const std::string where = fmt::format("{}: {}", p.file(), pattern.field(kind));
    splits.push_back(pattern.given("Regex") ? SplitPattern::regex(text, where) : SplitPattern::literal(text, where));
  } else if (type == "ByteLevel" && last) {
    if (p.boolean_or("add_prefix_space", true)) p.unsupported("add_prefix_space", "false");
    if (p.boolean_or("use_regex", true)) p.unsupported("use_regex", "false");
  } else {
    p.unsupported("type", "any number of \"Split\", then one \"ByteLevel\"");
  }
}

void Tokenizer::State::load_post_processor(const JsonObject& p) {
  const std::string type = p.string("type");
  if (type == "ByteLevel") return;  // moves offsets, never ids
  if (type == "Sequence") {
    const std::vector<Json>& list = p.array("processors");
    for (size_t i = 0; i < list.size(); ++i) {
      const JsonObject step(kFunction, p.file(), p.field(fmt::format("processors[{}]", i)), list[i]);
      if (step.string("type") == "Sequence") step.unsupported("type", "\"ByteLevel\" or \"TemplateProcessing\"");
      load_post_processor(step);
    }
    return;
  }
  if (type != "TemplateProcessing")
    p.unsupported("type", "\"ByteLevel\", \"TemplateProcessing\" or a Sequence of these");
  if (!prefix.empty()) p.unsupported("type", "one TemplateProcessing");
  const std::vector<Json>& single = p.array("single");
  bool text_seen = false;
  for (size_t i = 0; i < single.size(); ++i) {
    const JsonObject item(kFunction, p.file(), p.field(fmt::format("single[{}]", i)), single[i]);
    if (item.given("Sequence") && !text_seen) {
      text_seen = true;
    } else if (item.given("SpecialToken") && !text_seen) {
      const JsonObject special = item.object("SpecialToken");
      prefix.push_back(id_of(special, "id", special.string("id")));
    } else {
      p.unsupported("single", "special tokens in front of one Sequence, and nothing behind it");
    }
  }
  if (!text_seen) p.refuse("single", "an array with a Sequence");
}

void Tokenizer::State::load(const Json& json, const std::string& file) {
  const JsonObject root(kFunction, file, "", json);
  require_nothing(root, "truncation");
  require_nothing(root, "padding");
  check_normalizer(root);
  load_model(root.object("model"));
  load_added(root);
  load_pre_tokenizer(root.object("pre_tokenizer"), true);
  if (root.given("post_processor")) load_post_processor(root.object("post_processor"));
  if (root.given("decoder")) {
    const JsonObject decoder = root.object("decoder");
    if (decoder.string("type") != "ByteLevel") decoder.unsupported("type", "\"ByteLevel\"");
  }
}

void Tokenizer::State::load_config(const Json& json, const std::string& file) {
  const JsonObject config(kFunction, file, "", json);
  if (config.boolean_or("add_eos_token", false)) config.unsupported("add_eos_token", "false");
  if (config.boolean_or("add_prefix_space", false)) config.unsupported("add_prefix_space", "false");
  if (!config.boolean_or("add_bos_token", false)) return;
  const Json& bos = config.at("bos_token");
  if (!bos.is_string() && !bos.is_object()) config.refuse("bos_token", "a text, or an object with `content`");
  const std::string text = bos.is_object() ? config.object("bos_token").string("content") : config.string("bos_token");
  prefix = {id_of(config, "bos_token", text)};
}

Tokenizer::Tokenizer(std::unique_ptr<State> state) : state_(std::move(state)) {}
Tokenizer::Tokenizer(Tokenizer&&) noexcept = default;
Tokenizer& Tokenizer::operator=(Tokenizer&&) noexcept = default;
Tokenizer::~Tokenizer() = default;

Tokenizer Tokenizer::parse(std::string_view tokenizer_json, std::string_view tokenizer_config_json,
                           const std::string& name) {
  auto state = std::make_unique<State>();
  state->name = name;
  const std::string file = join_path(name, kTokenizerFile);
  state->load(parse_json(kFunction, tokenizer_json, file), file);
  if (!tokenizer_config_json.empty()) {
    const std::string config_file = join_path(name, kConfigFile);
    state->load_config(parse_json(kFunction, tokenizer_config_json, config_file), config_file);
  }
  return Tokenizer(std::move(state));
}

Tokenizer Tokenizer::load(const std::string& directory_or_file) {
  struct stat s;
  const bool directory = ::stat(directory_or_file.c_str(), &s) == 0 && S_ISDIR(s.st_mode);
  const std::string file = directory ? join_path(directory_or_file, kTokenizerFile) : directory_or_file;
  const size_t slash = file.rfind('/');
  const std::string beside = slash == std::string::npos ? kConfigFile : file.substr(0, slash + 1) + kConfigFile;

  auto state = std::make_unique<State>();
  state->name = directory_or_file;
  state->load(parse_json(kFunction, read_file(kFunction, file, kMaxFileBytes), file), file);
  if (file_exists(beside))
    state->load_config(parse_json(kFunction, read_file(kFunction, beside, kMaxFileBytes), beside), beside);
  return Tokenizer(std::move(state));
}

namespace {

/// A stretch of text, or an added token cut out of it.
struct Segment {
  Piece piece;
  int32_t id;  // -1: text
};

/// Cuts `tokens` out of the text segments.
std::vector<Segment> cut_out(std::string_view text, const AddedTokens& tokens, const std::vector<Segment>& segments) {
  std::vector<Segment> result;
  for (const Segment& s : segments) {
    if (s.id >= 0) {
      result.push_back(s);
      continue;
    }
    const std::string_view inside = text.substr(0, s.piece.end);
    size_t begin = s.piece.begin;
    for (size_t i = begin; i < inside.size();) {
      const AddedToken* token = tokens.match(inside, i);
      if (token == nullptr) {
        ++i;
        continue;
      }
      if (i > begin) result.push_back({{begin, i}, -1});
      result.push_back({{i, i + token->text.size()}, token->id});
      begin = i += token->text.size();
    }
    if (begin < s.piece.end) result.push_back({{begin, s.piece.end}, -1});
  }
  return result;
}

}  // namespace

std::vector<int32_t> Tokenizer::encode(std::string_view text, const EncodeOptions& options) const {
  const State& s = *state_;
  if (const size_t bad = find_invalid_utf8(text); bad != std::string_view::npos)
    fail_argument("encode", "text has the byte 0x{:02x} at offset {}; accepted: UTF-8",
                  static_cast<unsigned>(static_cast<unsigned char>(text[bad])), bad);
  std::vector<Segment> segments;
  if (!text.empty()) segments.push_back({{0, text.size()}, -1});
  segments = cut_out(text, options.special_as_text ? s.first_plain : s.first_all, segments);
  segments = cut_out(text, options.special_as_text ? s.second_plain : s.second_all, segments);

  std::vector<int32_t> ids;
  SplitPattern::Scratch scratch;
  Merger merger(s.merges);
  std::vector<Piece> pieces;
  std::vector<Piece> smaller;
  std::vector<int32_t> symbols;
  for (const Segment& segment : segments) {
    if (segment.id >= 0) {
      ids.push_back(segment.id);
      continue;
    }
    pieces.assign(1, segment.piece);
    for (const SplitPattern& pattern : s.splits) {
      smaller.clear();
      for (const Piece& piece : pieces) pattern.split(text, piece, scratch, &smaller);
      pieces.swap(smaller);
    }
    for (const Piece& piece : pieces) {
      const std::string_view bytes = text.substr(piece.begin, piece.end - piece.begin);
      if (s.ignore_merges) {
        if (const auto it = s.whole_pieces.find(std::string(bytes)); it != s.whole_pieces.end()) {
          ids.push_back(it->second);
          continue;
        }
      }
      symbols.clear();
      for (size_t i = 0; i < bytes.size(); ++i) {
        const auto byte = static_cast<unsigned char>(bytes[i]);
        if (s.byte_ids[byte] < 0)
          fail(ErrorCode::kUnsupported, "encode", "{}: the vocabulary has no token for the byte 0x{:02x} (offset {})",
               s.name, static_cast<unsigned>(byte), piece.begin + i);
        symbols.push_back(s.byte_ids[byte]);
      }
      merger.run(symbols, &ids);
    }
  }
  const bool there = ids.size() >= s.prefix.size() && std::equal(s.prefix.begin(), s.prefix.end(), ids.begin());
  if (options.add_bos && !there) ids.insert(ids.begin(), s.prefix.begin(), s.prefix.end());
  return ids;
}

std::string Tokenizer::Stream::push(int32_t id) {
  if (id < 0) fail_argument("decode", "id is {}; accepted: 0 and up", id);
  const auto& tokens = tokenizer_->state_->tokens;
  const auto it = tokens.find(id);
  if (it != tokens.end() && it->second.special && options_.skip_special) return {};
  std::string text;
  if (it == tokens.end()) {
    text = finish() + kReplacement;
    return text;
  }
  held_ += it->second.bytes;
  held_.erase(0, append_text(&text, held_, false));
  return text;
}

std::string Tokenizer::Stream::finish() {
  std::string text;
  append_text(&text, held_, true);
  held_.clear();
  return text;
}

std::string Tokenizer::decode(std::span<const int32_t> ids, const DecodeOptions& options) const {
  Stream stream(*this, options);
  std::string text;
  for (const int32_t id : ids) text += stream.push(id);
  return text + stream.finish();
}

int64_t Tokenizer::vocab_size() const noexcept { return state_->vocab_size; }

std::optional<int32_t> Tokenizer::bos_id() const noexcept {
  if (state_->prefix.empty()) return std::nullopt;
  return state_->prefix.front();
}

std::optional<int32_t> Tokenizer::find(std::string_view token) const {
  const auto it = state_->ids.find(std::string(token));
  if (it == state_->ids.end()) return std::nullopt;
  return it->second;
}

bool Tokenizer::is_special(int32_t id) const noexcept {
  const auto it = state_->tokens.find(id);
  return it != state_->tokens.end() && it->second.special;
}

}  // namespace v0
}  // namespace gannet
