// What the search box asks. The theme's search takes each word of a question as the beginning of a word: "is" finds "issue", "not" finds "notebook",
// and such words outweigh the rest. Here words without a subject are left out; the others lose their ending and count more where they are whole.
const small = new Set(
  ("a about all am an and any are as at be but by can could do does for from get had has have how i if in into is it its may me my no not of on or our " +
    "should so than that the their them then there these they this to train us use used using was we were what when where which while who why will with would " +
    "work works you your").split(" "),
);
const whole = 2; // weight of the word as it was typed

function asked(query) {
  if (/["+*^~:]/.test(query)) return query; // the language of the search itself
  const words = query.toLowerCase().replace(/[?!.,;]+(?=\s|$)/g, "").split(/\s+/).filter(Boolean);
  const kept = words.filter((word) => !small.has(word));
  return (kept.length ? kept : words).map((word) => `${word}^${whole} ${stem(word)}`).join(" ");
}

function stem(word) {
  const short = word.replace(/(?:ings?|ies|ed|es|e|(?<!s)s)$/, "");
  return short.length >= 4 || (short.length === 3 && word === `${short}s`) ? short : word;
}

const post = Worker.prototype.postMessage;
Worker.prototype.postMessage = function (message, ...rest) {
  const query = message?.type === 2; // 0 sends the index
  return post.call(this, query ? { ...message, data: asked(message.data) } : message, ...rest);
};
