// Elements by calls: no text ever becomes HTML here.

export const byId = (id) => document.getElementById(id);

/** Make an element: its class, and what it holds, texts or other elements. */
export function make(tag, kind = "", ...children) {
  const element = document.createElement(tag);
  if (kind) element.className = kind;
  element.append(...children);
  return element;
}

export function button(text, label, pressed) {
  const made = make("button", "", text);
  made.type = "button";
  if (label) made.setAttribute("aria-label", label);
  made.addEventListener("click", pressed);
  return made;
}
