// Elements from data. Text is only ever set as text, so no name from outside can become markup.

export const byId = (id) => document.getElementById(id);

/** `h("td", {class: "num", "data-label": "Routes"}, "12", element)`; null children are left out. */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) element.setAttribute(name, String(value));
  }
  element.append(...children.filter((child) => child !== null && child !== undefined).map((child) => (child instanceof Node ? child : String(child))));
  return element;
}

/** A bar of `share` (0 to 1) of its box, with a mark at `mark` where one is given. Its number stands beside it, so readers skip it. */
export function bar(share, colour, mark = null) {
  const fill = h("i");
  fill.style.setProperty("--w", `${Math.min(100, Math.max(0, (share ?? 0) * 100)).toFixed(2)}%`);
  if (colour) fill.style.setProperty("--c", `var(--${colour})`);
  let at = null;
  if (mark !== null) {
    at = h("b");
    at.style.setProperty("--at", `${Math.min(100, Math.max(0, mark * 100)).toFixed(2)}%`);
  }
  return h("span", { class: "bar", "aria-hidden": "true" }, fill, at);
}

const SIGNS = { good: "✓", warn: "!", bad: "✕", calm: "·" };

export const badge = (text, kind = "calm") => h("span", { class: `badge ${kind}` }, h("span", { "aria-hidden": "true" }, SIGNS[kind]), text);

/** Make `parent` hold `fresh`. Elements of the same key and shape are kept and rewritten, so that focus, selection and transitions survive
 * a beat. Keys are `data-key`. */
export function reconcile(parent, fresh) {
  const old = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  let at = parent.firstElementChild;
  for (const element of fresh) {
    const known = old.get(element.dataset.key);
    old.delete(element.dataset.key);
    if (known !== undefined && sameShape(known, element)) {
      if (!known.isEqualNode(element)) rewrite(known, element);
      if (known === at) at = at.nextElementSibling;
      else parent.insertBefore(known, at);
      continue;
    }
    if (known !== undefined) {
      if (known === at) at = at.nextElementSibling;
      known.remove();
    }
    parent.insertBefore(element, at);
  }
  for (const gone of old.values()) gone.remove();
}

function sameShape(left, right) {
  if (left.nodeName !== right.nodeName || left.childNodes.length !== right.childNodes.length) return false;
  return [...left.childNodes].every((child, i) => sameShape(child, right.childNodes[i]));
}

function rewrite(known, fresh) {
  if (known.nodeType === Node.TEXT_NODE) {
    if (known.data !== fresh.data) known.data = fresh.data;
    return;
  }
  for (const { name } of [...known.attributes]) if (!fresh.hasAttribute(name)) known.removeAttribute(name);
  for (const { name, value } of fresh.attributes) {
    if (known.getAttribute(name) === value) continue;
    // As an attribute a style is inline style, which the page's policy forbids.
    if (name === "style") known.style.cssText = fresh.style.cssText;
    else known.setAttribute(name, value);
  }
  known.childNodes.forEach((child, i) => rewrite(child, fresh.childNodes[i]));
}

/** A cell of a table that becomes cards on a phone: there `label` stands before it. */
export const cell = (label, attributes, ...children) => h("td", { ...attributes, "data-label": label }, ...children);

export const keyed = (key, element) => {
  element.dataset.key = key;
  return element;
};

export function pairs(list, rows) {
  reconcile(list, rows.flatMap(([name, value]) => [keyed(`t ${name}`, h("dt", {}, name)), keyed(`d ${name}`, h("dd", {}, value))]));
}

export const show = (element, visible) => {
  element.hidden = !visible;
};
