// A Split pre-tokenizer: cuts text at the matches of a regular expression. The patterns in tokenizer.json are written
// for Oniguruma with its Ruby syntax; they are translated to PCRE2, and whatever the two read differently is refused:
//
//   \s \S    spelled out as the 25 code points with White_Space: PCRE2's \s in Unicode mode has U+180E too
//   \w \b    not the same letters (marks, connectors)            refused
//   \h \R \X \K \G \A \z, nested or intersected classes, ^ $, {,n}, {n}+, named groups, options but (?i: )   refused
//
// Thread safety: immutable; each thread brings its own Scratch.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace gannet {
inline namespace v0 {

/// Half-open range of bytes in a text.
struct Piece {
  size_t begin;
  size_t end;
};

class SplitPattern {
 public:
  /// `where` names file and field for errors. Throws Error(kUnsupported) for a pattern that is not accepted.
  static SplitPattern regex(std::string_view pattern, const std::string& where);
  /// Cuts at a fixed text.
  static SplitPattern literal(std::string_view text, const std::string& where);
  SplitPattern(SplitPattern&&) noexcept;
  SplitPattern& operator=(SplitPattern&&) noexcept;
  ~SplitPattern();

  /// Working memory for matching; made once for many calls.
  class Scratch {
   public:
    Scratch();
    ~Scratch();
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;

   private:
    friend class SplitPattern;
    struct State;
    std::unique_ptr<State> state_;
  };

  /// Appends the pieces of `piece` of `text` (valid UTF-8), matches and gaps alike, in order. Looks at nothing outside
  /// of the piece. Throws Error(kUnsupported) where a match takes more steps than 64 a byte of the piece.
  void split(std::string_view text, Piece piece, Scratch& scratch, std::vector<Piece>* pieces) const;

 private:
  struct State;
  explicit SplitPattern(std::unique_ptr<State> state);
  static SplitPattern compile(const std::string& pattern, unsigned options, const std::string& where);
  std::unique_ptr<State> state_;
};

/// The PCRE2 form of an Oniguruma pattern; for tests.
std::string translate_pattern(std::string_view pattern, const std::string& where);

}  // namespace v0
}  // namespace gannet
