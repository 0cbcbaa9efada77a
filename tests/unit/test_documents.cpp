// Documents that name tests and code: what they name is there, and nothing that they must cover is missing.
#include <gtest/gtest.h>

#include <cctype>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <memory>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

namespace {

namespace fs = std::filesystem;

std::string slurp(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  std::stringstream text;
  text << in.rdbuf();
  EXPECT_FALSE(text.str().empty()) << path;
  return text.str();
}

const fs::path kSource = GANNET_SOURCE_DIR;

/// The names of all tests of this build, as ctest lists them; `complete` is false where programs are not built.
struct Tests {
  std::vector<std::string> names;
  bool complete = true;

  Tests() {
    const std::string command =
        std::string("\"") + GANNET_CTEST + "\" --test-dir \"" + GANNET_BINARY_DIR + "\" -N 2>&1";
    const std::unique_ptr<FILE, int (*)(FILE*)> pipe(popen(command.c_str(), "r"), pclose);
    std::string out;
    char buffer[4096];
    while (pipe != nullptr && std::fgets(buffer, sizeof buffer, pipe.get()) != nullptr) out += buffer;
    const std::regex line(R"(Test +#\d+: (\S+))");
    for (std::sregex_iterator i(out.begin(), out.end(), line), end; i != end; ++i) {
      names.push_back((*i)[1]);
      if (names.back().find("_NOT_BUILT") != std::string::npos) complete = false;
    }
  }
  /// A name as documents give it: Suite.Case, which parameters may surround.
  bool has(const std::string& name) const {
    for (const std::string& n : names) {
      const size_t at = n.find(name);
      if (at == std::string::npos || (at > 0 && n[at - 1] != '/')) continue;
      const size_t end = at + name.size();
      if (end == n.size() || n[end] == '/') return true;
    }
    return false;
  }
};

std::vector<std::string> in_backticks(const std::string& text) {
  std::vector<std::string> all;
  const std::regex quoted("`([^`]+)`");
  for (std::sregex_iterator i(text.begin(), text.end(), quoted), end; i != end; ++i) all.push_back((*i)[1]);
  return all;
}

/// The cells of the rows of a document's tables, heads and rules left out.
std::vector<std::vector<std::string>> table_rows(const std::string& text) {
  std::vector<std::vector<std::string>> rows;
  std::stringstream lines(text);
  std::string line;
  bool head = true;
  while (std::getline(lines, line)) {
    if (line.rfind("| ", 0) != 0 && line.rfind("|-", 0) != 0) {
      head = true;
      continue;
    }
    if (line.rfind("|-", 0) == 0) {
      head = false;
      continue;
    }
    if (head) continue;
    std::vector<std::string> cells;
    std::stringstream parts(line.substr(1));
    std::string cell;
    while (std::getline(parts, cell, '|')) {
      const size_t first = cell.find_first_not_of(' '), last = cell.find_last_not_of(' ');
      cells.push_back(first == std::string::npos ? "" : cell.substr(first, last - first + 1));
    }
    rows.push_back(cells);
  }
  return rows;
}

bool is_test_name(const std::string& name) { return std::regex_match(name, std::regex(R"([A-Z]\w+\.[A-Z]\w+)")); }

TEST(Documents, KnownFaultsNameTestsThatExist) {
  const Tests tests;
  ASSERT_FALSE(tests.names.empty()) << "ctest lists nothing";
  if (!tests.complete) GTEST_SKIP() << "some test programs are not built";
  const auto rows = table_rows(slurp(kSource / "docs/known-faults.md"));
  std::set<std::string> ids;
  for (const std::vector<std::string>& row : rows) {
    ASSERT_GE(row.size(), 2u);
    EXPECT_TRUE(ids.insert(row[0]).second) << row[0] << " is there twice";
    int named = 0;
    for (const std::string& name : in_backticks(row.back())) {
      if (!is_test_name(name)) continue;
      ++named;
      EXPECT_TRUE(tests.has(name)) << row[0] << " names " << name << ", which ctest does not find";
    }
    EXPECT_TRUE(named > 0 || row.back().rfind("cannot arise", 0) == 0) << row[0] << " has no test and no reason";
  }
  for (int i = 1; i <= 45; ++i) {
    char id[8];
    std::snprintf(id, sizeof id, "BL-%02d", i);
    EXPECT_EQ(ids.count(id), 1u) << id;
  }
  for (int i = 1; i <= 43; ++i) EXPECT_EQ(ids.count("6." + std::to_string(i)), 1u) << i;
  EXPECT_EQ(ids.count("6.31b"), 1u);
  // A test that is named after a report is in its row.
  const std::regex report(R"((Faults|FaultsOfSteps)\.(BL(\d\d)|T6_(\d+))_\w+)");
  for (const std::string& test : tests.names) {
    std::smatch m;
    if (!std::regex_search(test, m, report)) continue;
    const std::string id = m[3].matched ? "BL-" + m[3].str() : "6." + m[4].str();
    bool found = false;
    for (const std::vector<std::string>& row : rows) {
      if (row[0] == id) found = row.back().find(m[0].str()) != std::string::npos;
    }
    EXPECT_TRUE(found) << test << " is not in the row of " << id;
  }
}

/// All C++ sources and headers of the library, the model and the engine.
std::string sources() {
  std::string all;
  for (const char* folder : {"include", "src"}) {
    for (const auto& entry : fs::recursive_directory_iterator(kSource / folder)) {
      const std::string extension = entry.path().extension().string();
      if (extension == ".h" || extension == ".cpp") all += slurp(entry.path());
    }
  }
  return all;
}

bool has_word(const std::string& text, const std::string& word) {
  const auto in_word = [&](size_t i) {
    return i < text.size() && (std::isalnum(static_cast<unsigned char>(text[i])) != 0 || text[i] == '_');
  };
  for (size_t at = text.find(word); at != std::string::npos; at = text.find(word, at + 1)) {
    if ((at == 0 || !in_word(at - 1)) && !in_word(at + word.size())) return true;
  }
  return false;
}

TEST(Documents, ReferenceMappingNamesWhatExists) {
  const Tests tests;
  ASSERT_FALSE(tests.names.empty()) << "ctest lists nothing";
  if (!tests.complete) GTEST_SKIP() << "some test programs are not built";
  const auto rows = table_rows(slurp(kSource / "docs/reference-mapping.md"));
  EXPECT_GE(rows.size(), 95u);
  const std::string code = sources();
  for (const std::vector<std::string>& row : rows) {
    ASSERT_EQ(row.size(), 3u) << row[0];
    EXPECT_FALSE(row[1].empty()) << row[0];
    bool named = false;
    for (const std::string& name : in_backticks(row[1])) {
      std::string word;
      for (const char c : name + ":") {  // Class::member: both
        if (c != ':') {
          word += c;
          continue;
        }
        if (word.empty()) continue;
        EXPECT_TRUE(has_word(code, word)) << row[0] << ": " << word;
        word.clear();
      }
    }
    for (const std::string& name : in_backticks(row[2])) {
      if (!is_test_name(name)) continue;
      named = true;
      EXPECT_TRUE(tests.has(name)) << row[0] << " names " << name << ", which ctest does not find";
    }
    EXPECT_TRUE(named || row[1].rfind("not needed", 0) == 0 || row[2].find("not needed") != std::string::npos ||
                !row[2].empty())
        << row[0] << " has no test and no reason";
  }
}

}  // namespace
