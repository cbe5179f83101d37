// What the scripts of Node share; the counterpart of ../checks.py, which explains the protocol.
import assert from 'node:assert/strict'

const [root, key] = process.argv.slice(2)
export const server = { url: `${root}/v1`, key }
export const MODEL = 'scripted'
// What clients/scripted_model.py answers.
export const SENTENCE = /^(The|Our|One|Each|Some|This)( \w+){5} [\w ]+\.$/
export const TALK = 'Good morning!'
export const WEATHER = 'How is the weather in Oslo?'
export const STORY = 'Tell me a story that never ends.'
export const REPORT = 'It is 3 degrees in Oslo.'
export const TOO_LONG = 'too long '.repeat(2000)
export const JSON_ASKED = 'Answer in JSON: who wrote the first program, at what age?'
const PATIENCE_MS = 10_000

export function weather({ city, days }) {
  assert.deepEqual([city, days], ['Oslo', 2])
  return `${days + 1} degrees`
}

export async function openRequests() {
  const text = await (await fetch(`${root}/metrics`)).text()
  const counts = [...text.matchAll(/^vllm:num_requests_(?:running|waiting){.*} (\S+)$/gm)]
  assert(counts.length > 0, 'no such metrics')
  return counts.reduce((sum, [, count]) => sum + Number(count), 0)
}

export async function becomesIdle() {
  for (const deadline = Date.now() + PATIENCE_MS; (await openRequests()) > 0; ) {
    assert(Date.now() < deadline, 'the server goes on for a client that has left')
    await new Promise((resolve) => setTimeout(resolve, 50))
  }
}

// Asserts that `call` fails, with an error that `expected` says is the right one.
export async function raises(expected, call) {
  await assert.rejects(async () => void (await call()), (error) => {
    assert(expected(error), `${error}`)
    return true
  })
}

const checks = []
export const works = (feature, check) => checks.push([feature, 'works', check])
export const refused = (feature, check) => checks.push([feature, 'refused', check])

export async function main() {
  for (const [feature, outcome, check] of checks) {
    const start = Date.now()
    const trouble = await check().then(() => null, (error) => error.stack ?? String(error))
    if (trouble !== null) process.exitCode = 1
    const seconds = (Date.now() - start) / 1000
    const result = { feature, outcome: trouble === null ? outcome : 'failed', seconds, trouble }
    console.log(JSON.stringify(result))
  }
}
