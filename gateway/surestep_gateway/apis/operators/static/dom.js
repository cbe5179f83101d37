// Trees of elements, built anew for every look and laid over what is shown. Text is only ever text:
// nothing here parses HTML, so nothing that a model or a server says can become an element.

const SVG = "http://www.w3.org/2000/svg";

/** An element. Children may be nodes, texts, numbers, lists of these, or null. */
export function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** The same for pictures. */
export function s(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) {
      element.setAttribute(name, value === true ? "" : value);
    }
  }
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined && child !== false) {
      element.append(asNode(child));
    }
  }
  return element;
}

const asNode = (child) => (child instanceof Node ? child : document.createTextNode(child));

/** Make what `shown` contains equal to `nodes`, keeping elements that are there: focus, selection,
 * what is unfolded, and the place where a user reads survive. */
export function show(shown, ...nodes) {
  const wanted = nodes.flat(Infinity).filter((node) => node).map(asNode);
  wanted.forEach((node, index) => {
    const there = shown.childNodes[index];
    if (there === undefined) shown.append(node);
    else if (there.nodeName !== node.nodeName) shown.replaceChild(node, there);
    else if (node.nodeType === Node.TEXT_NODE) {
      if (there.data !== node.data) there.data = node.data;
    } else overlay(there, node);
  });
  while (shown.childNodes.length > wanted.length) shown.lastChild.remove();
}

function overlay(there, node) {
  for (const { name } of [...there.attributes]) {
    const folds = name === "open" && there.nodeName === "DETAILS"; // the reader's choice
    if (!folds && !node.hasAttribute(name)) there.removeAttribute(name);
  }
  for (const { name, value } of [...node.attributes]) {
    if (there.getAttribute(name) !== value) there.setAttribute(name, value);
  }
  show(there, [...node.childNodes]);
}

/** The element of an id in the page. */
export const byId = (id) => document.getElementById(id);
