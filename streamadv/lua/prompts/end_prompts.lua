-- What ends of groups mean for their prompts: trained on, filtered, played again under the next try, or given up. An end
-- counts unless its prompt has ended or is at a later try, so carrying it here twice changes nothing. A home shard that has
-- lost its last writes may hear of a prompt that it has not begun, or of a later try.
-- KEYS  void, prompt_state, prompt_entries, prompt_again, prompt_given_up, prompt_solved
-- ARGV  retries; shard, last entry of its ends that the caller had known, and the last one here; 'check' (take them only if
--       the run had known just as much) or 'repeat'; then of each end: prompt, try, epoch, outcome, and where solved
--       prompts are skipped '<its number among the prompts of all sources> <1 if all its rewards are the best, else 0>'
-- Returns  the last entry known: another one than the caller's if nothing was changed
-- include prompts
-- include prompt_state
local GIVEN_UP_KEPT = 1000
local FILTERS = {zero_variance = true, difficulty = true}
local NO_FAULT = {rolled_back = true}  -- of the prompt: it is played again as often as this happens
local retries, cursor = tonumber(ARGV[1]), 'cursor:' .. ARGV[2]
if ARGV[5] == 'check' then
  local known = redis.call('HGET', keys.prompt_state, cursor) or '0-0'
  if known ~= ARGV[3] then return known end
end
redis.call('HSET', keys.prompt_state, cursor, ARGV[4])

-- Entries of these prompts, as this call leaves them; false = none.
local entries, changed, counts, next_of = {}, {}, {}, {}
local items = {}
for i = 6, #ARGV, 5 do items[#items + 1] = ARGV[i] end
if #items == 0 then return ARGV[4] end
for i, entry in ipairs(redis.call('HMGET', keys.prompt_entries, unpack(items))) do entries[items[i]] = entry end
local base = number_of('base')

local function change(item, entry) entries[item], changed[item] = entry, true end

-- Try and failures of a prompt, and the nonce of its lease; nil if it has no entry.
local function entry_of(item)
  local try, failures, nonce = string.match(entries[item] or '', '^(%d+) (%d+) (%S+)')
  return tonumber(try or ''), tonumber(failures or ''), nonce
end

-- Whether the prompt is below `next` of its source.
local function is_begun(item)
  local source, position = string.match(item, '^(%d+) (%d+)$')
  next_of[source] = next_of[source] or number_of('next:' .. source)
  return tonumber(position) < next_of[source]
end

local function count_up(what, item, epoch, by)
  local counter = what .. ' ' .. string.match(item, '^%d+') .. ' ' .. epoch
  counts[counter] = (counts[counter] or 0) + by
end

local function finish(item, epoch, what)
  local _, _, nonce = entry_of(item)
  if nonce == NOBODY then redis.call('ZREM', keys.prompt_again, item) end
  change(item, not is_begun(item) and 'ended')
  count_up(what, item, epoch, 1)
end

local function give_up(item, try, epoch, outcome)
  finish(item, epoch, 'given_up:' .. outcome)
  local order = redis.call('HINCRBY', keys.prompt_state, 'given_up', 1)
  redis.call('ZADD', keys.prompt_given_up, whole(order), item .. ' ' .. whole(try) .. ' ' .. outcome)
  if redis.call('ZCARD', keys.prompt_given_up) > GIVEN_UP_KEPT then
    redis.call('ZREM', keys.prompt_given_up, redis.call('ZRANGE', keys.prompt_given_up, 0, 0)[1])
  end
end

local function put(item, try, failures, nonce) change(item, whole(try) .. ' ' .. whole(failures) .. ' ' .. nonce) end

-- An operator has put a dead group back: its try is in play again, unless another one is.
local function take_back(item, try, epoch)
  local now, failures, nonce = entry_of(item)
  if now == try + 1 and nonce == NOBODY then
    redis.call('ZREM', keys.prompt_again, item)
    count_up('again:dead', item, epoch, -1)
    put(item, try, math.max(0, failures - 1), GONE)
  elseif not now and redis.call('ZREM', keys.prompt_given_up, item .. ' ' .. whole(try) .. ' dead') == 1 then
    put(item, try, retries, GONE)
    count_up('given_up:dead', item, epoch, -1)
  end
end

-- Whether an end of this try counts, and how often the prompt had failed before.
local function tries_of(item, try)
  local now, failures = entry_of(item)
  if now then return try >= now, failures end
  return not (entries[item] or is_begun(item)) and try >= base, try - base
end

-- How many epochs running the prompt was solved, for `skip_prompts`.
local function note_solved(mark)
  local number, is_solved = string.match(mark, '^(%d+) ([01])$')
  if not number then return end
  local before = tonumber(redis.call('GETRANGE', keys.prompt_solved, number, number)) or 0
  redis.call('SETRANGE', keys.prompt_solved, number, is_solved == '1' and whole(math.min(9, before + 1)) or '0')
end

for i = 6, #ARGV, 5 do
  local item, try, epoch, outcome = ARGV[i], tonumber(ARGV[i + 1]), ARGV[i + 2], ARGV[i + 3]
  local counted, failures = tries_of(item, try)
  if outcome == 'requeued' then
    take_back(item, try, epoch)
  elseif not counted then
    -- It has ended, or is played under a later try.
  elseif outcome == 'trained' or outcome == 'repeated' or FILTERS[outcome] then
    finish(item, epoch, FILTERS[outcome] and 'filtered:' .. outcome or 'trained')
    note_solved(ARGV[i + 4])
  elseif failures >= retries and not NO_FAULT[outcome] then
    give_up(item, try, epoch, outcome)
  else
    put(item, try + 1, failures + (NO_FAULT[outcome] and 0 or 1), NOBODY)
    redis.call('ZADD', keys.prompt_again, string.match(item, '%d+$'), item)
    note_try(try + 1)
    count_up('again:' .. outcome, item, epoch, 1)
  end
end

local put_in, gone = {}, {}
for _, item in ipairs(items) do
  if not changed[item] then
    -- As it was, or done already.
  elseif entries[item] then
    put_in[#put_in + 1], put_in[#put_in + 2] = item, entries[item]
  else
    gone[#gone + 1] = item
  end
  changed[item] = nil
end
if #put_in > 0 then redis.call('HSET', keys.prompt_entries, unpack(put_in)) end
if #gone > 0 then redis.call('HDEL', keys.prompt_entries, unpack(gone)) end
for counter, number in pairs(counts) do redis.call('HINCRBY', keys.prompt_state, counter, whole(number)) end
return ARGV[4]
