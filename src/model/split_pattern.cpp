#include "model/split_pattern.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <algorithm>
#include <new>

#include "model/json_file.h"
#include "model/unicode.h"

namespace gannet {
inline namespace v0 {
namespace {

constexpr const char* kFunction = "tokenizer";

// The code points with the property White_Space, and all others, as ranges for a character class.
constexpr const char* kSpaces =
    R"(\x{9}-\x{d}\x{20}\x{85}\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000})";
constexpr const char* kNotSpaces =
    R"(\x{0}-\x{8}\x{e}-\x{1f}\x{21}-\x{84}\x{86}-\x{9f}\x{a1}-\x{167f}\x{1681}-\x{1fff}\x{200b}-\x{2027})"
    R"(\x{202a}-\x{202e}\x{2030}-\x{205e}\x{2060}-\x{2fff}\x{3001}-\x{10ffff})";

// Steps that a match may take from one start: a run of n spaces takes about 2n in DeepSeek's third pattern. Exponential
// patterns run into it instead of hanging.
constexpr uint64_t kMatchSteps = 100'000;
constexpr uint64_t kMatchStepsPerByte = 64;
constexpr uint32_t kHeapLimitKib = 256 * 1024;
constexpr size_t kJitStackStart = 32 * 1024;
constexpr size_t kJitStackMax = 16 * 1024 * 1024;

constexpr size_t kMaxPatternBytes = 100'000;

class Translator {
 public:
  Translator(std::string_view pattern, const std::string& where) : in_(pattern), where_(where) {}

  std::string run() {
    while (i_ < in_.size()) {
      const char c = in_[i_];
      if (c == '\\') escape(false);
      else if (c == '[') character_class();
      else if (c == '(') group();
      else if (c == '^' || c == '$') refuse("an anchor");
      else if (c == '{') interval();
      else out_ += in_[i_++];
    }
    return std::move(out_);
  }

 private:
  [[noreturn]] void refuse(std::string_view what) const {
    fail(ErrorCode::kUnsupported, kFunction, "{}: pattern {} has {} at byte {}, which is not implemented", where_,
         show_text(in_), what, i_);
  }

  bool at(size_t i, std::string_view text) const { return in_.substr(std::min(i, in_.size())).starts_with(text); }

  void escape(bool in_class) {
    if (i_ + 1 >= in_.size()) refuse("a lone backslash");
    const char c = in_[i_ + 1];
    const auto u = static_cast<unsigned char>(c);
    const bool alphanumeric = (u >= '0' && u <= '9') || (u >= 'A' && u <= 'Z') || (u >= 'a' && u <= 'z');
    if (c == 's' || c == 'S') {
      const char* set = c == 's' ? kSpaces : kNotSpaces;
      out_ += in_class ? std::string(set) : "[" + std::string(set) + "]";
      i_ += 2;
    } else if (c == 'p' || c == 'P') {
      const size_t end = in_.find('}', i_);
      if (!at(i_ + 2, "{") || end == std::string_view::npos) refuse("a property without braces");
      out_ += in_.substr(i_, end + 1 - i_);
      i_ = end + 1;
    } else if (c == 'r' || c == 'n' || c == 't' || c == 'f' || c == 'd' || c == 'D' || !alphanumeric) {
      // \d is \p{Nd} in both. An escaped character beyond ASCII stands for itself; its other bytes follow as literals.
      out_ += in_.substr(i_, 2);
      i_ += 2;
    } else {
      refuse("the escape \\" + std::string(1, c));
    }
  }

  void character_class() {
    out_ += in_[i_++];
    if (at(i_, "^")) out_ += in_[i_++];
    if (at(i_, "]")) refuse("an empty character class");
    while (i_ < in_.size() && in_[i_] != ']') {
      if (in_[i_] == '\\') {
        escape(true);
        continue;
      }
      if (in_[i_] == '[') refuse("a character class in another");
      if (at(i_, "&&")) refuse("an intersection of character classes");
      out_ += in_[i_++];
    }
    if (i_ >= in_.size()) refuse("an unfinished character class");
    out_ += in_[i_++];
  }

  void group() {
    if (at(i_, "(*")) refuse("a verb");
    if (at(i_, "(?")) {
      for (const std::string_view start : {"(?:", "(?i:", "(?=", "(?!", "(?<=", "(?<!", "(?>"}) {
        if (!at(i_, start)) continue;
        out_ += start;
        i_ += start.size();
        return;
      }
      refuse("a group of an unknown kind");
    }
    out_ += in_[i_++];
  }

  /// {n}, {n,} and {n,m} mean the same to both; {,m} and a following + do not, and other braces are left to neither.
  void interval() {
    size_t j = i_ + 1;
    const auto digits = [&] {
      const size_t start = j;
      while (j < in_.size() && in_[j] >= '0' && in_[j] <= '9') ++j;
      return j > start;
    };
    if (!digits()) refuse("a brace that begins no {n,m}");
    if (at(j, ",")) {
      ++j;
      digits();
    }
    if (!at(j, "}")) refuse("a brace that begins no {n,m}");
    ++j;
    if (at(j, "+")) refuse("{n,m} followed by +");
    out_ += in_.substr(i_, j - i_);
    i_ = j;
  }

  std::string_view in_;
  const std::string& where_;
  std::string out_;
  size_t i_ = 0;
};

std::string error_text(int code) {
  PCRE2_UCHAR8 buffer[256];
  pcre2_get_error_message_8(code, buffer, sizeof(buffer));
  return reinterpret_cast<const char*>(buffer);
}

struct FreeCode {
  void operator()(pcre2_code_8* p) const { pcre2_code_free_8(p); }
};
struct FreeMatchData {
  void operator()(pcre2_match_data_8* p) const { pcre2_match_data_free_8(p); }
};
struct FreeMatchContext {
  void operator()(pcre2_match_context_8* p) const { pcre2_match_context_free_8(p); }
};
struct FreeCompileContext {
  void operator()(pcre2_compile_context_8* p) const { pcre2_compile_context_free_8(p); }
};
struct FreeJitStack {
  void operator()(pcre2_jit_stack_8* p) const { pcre2_jit_stack_free_8(p); }
};

}  // namespace

std::string translate_pattern(std::string_view pattern, const std::string& where) {
  return Translator(pattern, where).run();
}

struct SplitPattern::State {
  std::unique_ptr<pcre2_code_8, FreeCode> code;
  std::string where;
};

struct SplitPattern::Scratch::State {
  std::unique_ptr<pcre2_match_data_8, FreeMatchData> data;
  std::unique_ptr<pcre2_match_context_8, FreeMatchContext> context;
  std::unique_ptr<pcre2_jit_stack_8, FreeJitStack> stack;
};

SplitPattern::Scratch::Scratch() : state_(std::make_unique<State>()) {
  state_->data.reset(pcre2_match_data_create_8(1, nullptr));  // the ends of the whole match; groups are not asked for
  state_->context.reset(pcre2_match_context_create_8(nullptr));
  if (state_->data == nullptr || state_->context == nullptr) throw std::bad_alloc();
  pcre2_set_heap_limit_8(state_->context.get(), kHeapLimitKib);
  // nullptr where PCRE2 was built without a compiler: then the interpreter runs.
  state_->stack.reset(pcre2_jit_stack_create_8(kJitStackStart, kJitStackMax, nullptr));
  if (state_->stack != nullptr) pcre2_jit_stack_assign_8(state_->context.get(), nullptr, state_->stack.get());
}
SplitPattern::Scratch::~Scratch() = default;

SplitPattern::SplitPattern(std::unique_ptr<State> state) : state_(std::move(state)) {}
SplitPattern::SplitPattern(SplitPattern&&) noexcept = default;
SplitPattern& SplitPattern::operator=(SplitPattern&&) noexcept = default;
SplitPattern::~SplitPattern() = default;

SplitPattern SplitPattern::compile(const std::string& pattern, unsigned options, const std::string& where) {
  if (pattern.size() > kMaxPatternBytes)
    fail(ErrorCode::kUnsupported, kFunction, "{}: the pattern has {} bytes; accepted: at most {}", where,
         pattern.size(), kMaxPatternBytes);
  const std::unique_ptr<pcre2_compile_context_8, FreeCompileContext> context(pcre2_compile_context_create_8(nullptr));
  if (context == nullptr) throw std::bad_alloc();
  pcre2_set_newline_8(context.get(), PCRE2_NEWLINE_LF);
  int error = 0;
  PCRE2_SIZE offset = 0;
  auto state = std::make_unique<State>();
  state->where = where;
  state->code.reset(pcre2_compile_8(reinterpret_cast<PCRE2_SPTR8>(pattern.data()), pattern.size(), options | PCRE2_UTF,
                                    &error, &offset, context.get()));
  if (state->code == nullptr)
    fail(ErrorCode::kUnsupported, kFunction, "{}: pattern {} is not accepted: {} (at byte {} of its PCRE2 form {})",
         where, show_text(pattern), error_text(error), offset, show_text(pattern));
  // Where memory may not be made executable this fails, and the interpreter runs.
  pcre2_jit_compile_8(state->code.get(), PCRE2_JIT_COMPLETE);
  return SplitPattern(std::move(state));
}

SplitPattern SplitPattern::regex(std::string_view pattern, const std::string& where) {
  return compile(translate_pattern(pattern, where), PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C, where);
}

SplitPattern SplitPattern::literal(std::string_view text, const std::string& where) {
  return compile(std::string(text), PCRE2_LITERAL, where);
}

void SplitPattern::split(std::string_view text, Piece piece, Scratch& scratch, std::vector<Piece>* pieces) const {
  const std::string_view subject = text.substr(piece.begin, piece.end - piece.begin);
  pcre2_match_context_8* context = scratch.state_->context.get();
  pcre2_match_data_8* data = scratch.state_->data.get();
  const uint64_t steps = kMatchSteps + kMatchStepsPerByte * subject.size();
  pcre2_set_match_limit_8(context, static_cast<uint32_t>(std::min<uint64_t>(steps, 0xFFFFFFFFu)));
  const auto* start = reinterpret_cast<PCRE2_SPTR8>(subject.data());
  size_t gap = 0;   // where the text that belongs to no match yet begins
  size_t from = 0;  // where the next search begins
  while (from < subject.size()) {
    int rc = pcre2_match_8(state_->code.get(), start, subject.size(), from, PCRE2_NO_UTF_CHECK, data, context);
    if (rc == PCRE2_ERROR_JIT_STACKLIMIT)  // the interpreter keeps its state on the heap, and more of it
      rc = pcre2_match_8(state_->code.get(), start, subject.size(), from, PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT, data,
                         context);
    if (rc == PCRE2_ERROR_NOMATCH) break;
    if (rc < 0)  // 0 says that groups did not fit, which is so for every pattern that has some
      fail(ErrorCode::kUnsupported, kFunction, "{}: matching stopped at byte {} of a piece of {}: {}", state_->where,
           from, subject.size(), error_text(rc));
    const PCRE2_SIZE* ends = pcre2_get_ovector_pointer_8(data);
    const size_t begin = ends[0];
    const size_t end = ends[1];
    if (end <= begin) {  // an empty match is none; go on behind the next character
      if (begin >= subject.size()) break;
      from = std::max(from, begin) + utf8_step(subject, std::max(from, begin)).length;
      continue;
    }
    if (begin > gap) pieces->push_back({piece.begin + gap, piece.begin + begin});
    pieces->push_back({piece.begin + begin, piece.begin + end});
    gap = from = end;
  }
  if (gap < subject.size()) pieces->push_back({piece.begin + gap, piece.end});
}

}  // namespace v0
}  // namespace gannet
