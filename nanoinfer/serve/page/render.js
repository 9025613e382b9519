// A model's Markdown as elements. Its text is untrusted: HTML in it stays text, and images become their words.

import DOMPurify from "./vendor/purify.js";
import hljs from "./vendor/highlight.js";
import { Marked } from "./vendor/marked.js";

const TAGS = [
  "p", "br", "hr", "h1", "h2", "h3", "h4", "h5", "h6", "ul", "ol", "li", "blockquote", "pre", "code", "em", "strong",
  "del", "a", "table", "thead", "tbody", "tr", "th", "td", "span", "#text",
];
const LONGEST_CODE = 50_000; // characters that are coloured

const escaped = (text) => text.replace(/[&<>"']/g, (one) => `&#${one.charCodeAt(0)};`);

const marked = new Marked({
  gfm: true,
  renderer: {
    html: ({ text }) => escaped(text),
    image: ({ text, href }) => escaped(`[image: ${text || href}]`),
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
    code: ({ text, lang }) => {
      const language = (lang || "").match(/^[\w+#-]*/)[0];
      const known = text.length <= LONGEST_CODE && hljs.getLanguage(language);
      const inner = known ? hljs.highlight(text, { language, ignoreIllegals: true }).value : escaped(text);
      return `<pre><code>${inner}</code></pre>\n`;
    },
  },
});

/** Return what a text in Markdown is, as a fragment. */
export function rendered(text) {
  const fragment = DOMPurify.sanitize(marked.parse(text), {
    ALLOWED_TAGS: TAGS,
    ALLOWED_ATTR: ["href", "class", "start", "align"],
    ALLOWED_URI_REGEXP: /^(?:https?:|mailto:)/i,
    ALLOW_DATA_ATTR: false,
    ALLOW_ARIA_ATTR: false,
    RETURN_DOM_FRAGMENT: true,
  });
  for (const element of fragment.querySelectorAll("[class]")) {
    // Only the colours of code: no class of the page's.
    const kept = [...element.classList].filter((name) => element.localName === "span" && name.startsWith("hljs-"));
    element.className = kept.join(" ");
  }
  for (const link of fragment.querySelectorAll("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer nofollow";
    link.referrerPolicy = "no-referrer";
  }
  for (const block of fragment.querySelectorAll("pre, table")) {
    block.tabIndex = 0; // it may scroll, also by keys
  }
  return fragment;
}
