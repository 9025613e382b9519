// The last minutes of some rates and states, one point a second.

import { make } from "./dom.js";

const SECONDS = 300;
const SVG = "http://www.w3.org/2000/svg";

export class Plots {
  /** kinds: [{title, unit, value: (figures, rates, facts) => number}]; a plot appears with its first value above 0. */
  constructor(place, kinds) {
    this.kinds = kinds.map((kind) => ({ ...kind, points: [], shown: null }));
    this.place = place;
  }

  clear() {
    for (const kind of this.kinds) Object.assign(kind, { points: [], shown: null });
    this.place.replaceChildren();
  }

  add(time, ...read) {
    for (const kind of this.kinds) {
      const value = kind.value(...read) ?? 0;
      if (!kind.points.length && !value) continue;
      kind.points.push([time, value]);
      while (kind.points[0][0] < time - SECONDS) kind.points.shift();
      this.draw(kind, time);
    }
  }

  draw(kind, now) {
    if (kind.shown === null) {
      const image = document.createElementNS(SVG, "svg");
      image.setAttribute("viewBox", `0 0 ${SECONDS} 100`);
      image.setAttribute("preserveAspectRatio", "none");
      image.setAttribute("role", "img");
      const line = document.createElementNS(SVG, "polyline");
      image.append(line);
      const caption = make("figcaption");
      kind.shown = { image, line, caption };
      this.place.append(make("figure", "", caption, image));
    }
    const values = kind.points.map(([, value]) => value);
    const most = Math.max(...values);
    const said = (value) => value.toLocaleString("en", { maximumFractionDigits: value < 10 ? 2 : 0 });
    const { image, line, caption } = kind.shown;
    const at = ([time, value]) => `${(SECONDS - (now - time)).toFixed(1)},${(98 - (most ? value / most : 0) * 94).toFixed(1)}`;
    line.setAttribute("points", kind.points.map(at).join(" "));
    caption.textContent = `${kind.title}: ${said(values.at(-1))} ${kind.unit}, at most ${said(most)}`;
    image.setAttribute("aria-label", `${kind.title} in the last ${Math.round(now - kind.points[0][0])} seconds, ` +
      `at most ${said(most)} ${kind.unit}`);
  }
}
