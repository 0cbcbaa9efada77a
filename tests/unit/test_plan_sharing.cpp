// Which layers share a selection: every example and refusal of spec 0.1.11 and 3.2.
#include <gtest/gtest.h>

#include "gannet/error.h"
#include "gannet/index_sharing.h"

namespace {

using namespace gannet;
using Ints = std::vector<int32_t>;
using Words = std::vector<std::string>;

/// "FFSS" for readers.
std::string letters(const IndexSharing& s) {
  const Ints sources = selection_sources(s);
  std::string text;
  for (size_t l = 0; l < sources.size(); ++l) text += sources[l] == static_cast<int32_t>(l) ? 'F' : 'S';
  return text;
}
std::string by_freq(int64_t layers, std::optional<int64_t> freq, std::optional<int64_t> offset) {
  return letters({.num_hidden_layers = layers, .index_topk_freq = freq, .index_skip_topk_offset = offset});
}

template <class F>
std::string error_of(F&& f) {
  try {
    f();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::kInvalidArgument) << e.what();
    return e.what();
  }
  return {};
}

TEST(IndexSharing, Frequency) {
  // Full 0, 1, 2, then 6, 10, 14: the published form of 78 layers.
  EXPECT_EQ(by_freq(16, 4, 3), "FFFSSSFSSSFSSSFS");
  const Ints sources = selection_sources({.num_hidden_layers = 78, .index_topk_freq = 4, .index_skip_topk_offset = 3});
  int full = 0;
  for (int32_t l = 0; l < 78; ++l) {
    const bool is_full = l < 3 || (l - 2) % 4 == 0;
    full += is_full ? 1 : 0;
    EXPECT_EQ(sources[static_cast<size_t>(l)], is_full ? l : l - (l - 2) % 4) << l;
  }
  EXPECT_EQ(full, 21);  // spec appendix C counts 3 and every 4th from 6: 21
  // Without an offset: shared iff max(l - 1, 0) % freq != 0.
  EXPECT_EQ(by_freq(10, 4, std::nullopt), "FFSSSFSSSF");
  EXPECT_EQ(by_freq(10, 4, 2), "FFSSSFSSSF");
  EXPECT_EQ(by_freq(6, 2, 1), "FSFSFS");
  EXPECT_EQ(by_freq(5, 3, 2), "FFSSF");
  EXPECT_EQ(by_freq(4, 2, 100), "FFFF");
  // None shared: 1 and less, absent; whatever the offset says.
  for (const std::optional<int64_t> freq :
       {std::optional<int64_t>(1), std::optional<int64_t>(0), std::optional<int64_t>(-3), std::optional<int64_t>()})
    for (const std::optional<int64_t> offset :
         {std::optional<int64_t>(3), std::optional<int64_t>(0), std::optional<int64_t>(-1), std::optional<int64_t>()})
      EXPECT_EQ(by_freq(4, freq, offset), "FFFF");
  EXPECT_EQ(by_freq(0, 4, 3), "");
}

TEST(IndexSharing, Lists) {
  const Words words{"full", "S", "shared", "F"};
  EXPECT_EQ(letters({.num_hidden_layers = 4, .indexer_types = words}), "FSSF");
  EXPECT_EQ(letters({.num_hidden_layers = 4, .index_topk_pattern = words}), "FSSF");
  EXPECT_EQ(selection_sources({.num_hidden_layers = 4, .indexer_types = words}), (Ints{0, 0, 0, 3}));
  // More entries are for MTP layers, which have an indexer whatever they say.
  EXPECT_EQ(letters({.num_hidden_layers = 2, .indexer_types = words}), "FS");
}

TEST(IndexSharing, Precedence) {
  IndexSharing s{.num_hidden_layers = 4, .index_topk_freq = 2, .index_skip_topk_offset = 1};
  EXPECT_EQ(letters(s), "FSFS");
  s.index_topk_pattern = Words{"F", "F", "S", "S"};
  EXPECT_EQ(letters(s), "FFSS");
  s.indexer_types = Words{"F", "S", "S", "F"};
  EXPECT_EQ(letters(s), "FSSF");
  // The one that counts is not replaced by a later one where it is wrong, and later ones are not looked at.
  s.index_topk_pattern = Words{"X"};
  s.index_skip_topk_offset = -1;
  EXPECT_EQ(letters(s), "FSSF");
  s.indexer_types = Words{"F"};
  s.index_topk_pattern = Words{"F", "F", "S", "S"};
  EXPECT_NE(error_of([&] { (void)selection_sources(s); }), "");
}

TEST(IndexSharing, Refusals) {
  const auto text = [](const IndexSharing& s) { return error_of([&] { (void)selection_sources(s); }); };
  EXPECT_EQ(text({.num_hidden_layers = 3, .indexer_types = Words{"F", "S"}}),
            "[selection_sources] indexer_types has 2 entries; accepted: one for each of num_hidden_layers = 3 layers");
  EXPECT_EQ(text({.num_hidden_layers = 3, .index_topk_pattern = Words{}}),
            "[selection_sources] index_topk_pattern has 0 entries; accepted: one for each of num_hidden_layers = 3 "
            "layers");
  for (const char* word : {"X", "", "f", "FULL", "Shared", "full ", "F\n"}) {
    const std::string e = text({.num_hidden_layers = 2, .indexer_types = Words{"F", word}});
    EXPECT_NE(e.find("indexer_types[1] is "), std::string::npos) << word;
    EXPECT_NE(e.find("accepted: \"F\", \"S\", \"full\" or \"shared\""), std::string::npos) << word;
    EXPECT_EQ(e.find('\n'), std::string::npos);
  }
  EXPECT_NE(text({.num_hidden_layers = 1, .indexer_types = Words{"F", "X"}}), "") << "an MTP layer's word is checked";
  EXPECT_LT(text({.num_hidden_layers = 1, .indexer_types = Words{std::string(1000000, 'x')}}).size(), 300u);
  for (const char* word : {"S", "shared"})
    EXPECT_EQ(text({.num_hidden_layers = 1, .index_topk_pattern = Words{word}}),
              std::string("[selection_sources] index_topk_pattern[0] is \"") + word +
                  "\"; accepted: \"full\", since layer 0 has nothing to share");
  for (const int64_t offset : {int64_t{0}, int64_t{-1}})
    EXPECT_EQ(text({.num_hidden_layers = 4, .index_topk_freq = 2, .index_skip_topk_offset = offset}),
              "[selection_sources] index_skip_topk_offset is " + std::to_string(offset) +
                  "; accepted: at least 1 with index_topk_freq = 2, since layer 0 has nothing to share");
  EXPECT_EQ(text({.num_hidden_layers = -1}), "[selection_sources] num_hidden_layers is -1; accepted: 0 to 2147483647");
}

}  // namespace
