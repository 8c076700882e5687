-- What ends of groups mean for their prompts: trained on, filtered, played again under the next try, or given up. An end
-- counts unless its prompt has ended, or is at a later try and this one was not trained on, so carrying it here twice
-- changes nothing. A home shard that has lost its last writes may hear of a prompt that it has not begun, or of a later
-- try.
-- KEYS  void, prompt_state, prompt_entries, prompt_again, prompt_given_up, prompt_solved
-- ARGV  retries; shard, last entry of its ends that the caller had known, and the last one here; 'check' (take them only if
--       the run had known just as much) or 'repeat'; after how many epochs solved prompts are skipped, 0 = never; then of
--       ends that follow one another and share these: '<number of the source> <epoch> <try> <outcome>', and of each of them
--       ' <position>', and where solved prompts are skipped '/<its number among the prompts of all sources>/<1 if all its
--       rewards are the best, else 0>'
-- Returns  the last entry known: another one than the caller's if nothing was changed
-- include prompts
-- include prompt_state
-- include prompt_solved
local GIVEN_UP_KEPT = 1000
local FILTERS = {zero_variance = true, difficulty = true}
local IN_WEIGHTS = {trained = true, repeated = true}  -- one try: no other one is played any more
local NO_FAULT = {rolled_back = true}  -- of the prompt: it is played again as often as this happens
local retries, cursor, skip_solved = tonumber(ARGV[1]), 'cursor:' .. ARGV[2], tonumber(ARGV[6])
if ARGV[5] == 'check' then
  local known = redis.call('HGET', keys.prompt_state, cursor) or ''
  local ms, number = string.match(known, '^(%d+)%-(%d+)$')
  if not ms or #ms > 19 or #number > 19 then known = '0-0' end  -- no process of the run has written it
  if known ~= ARGV[3] then return known end
end
if ARGV[4] ~= ARGV[3] then redis.call('HSET', keys.prompt_state, cursor, ARGV[4]) end

-- Entries of these prompts, as this call leaves them; false = none.
local entries, changed, counts, next_of, back_of = {}, {}, {}, {}, {}
local ends, items = {}, {}
for i = 7, #ARGV do
  local source, epoch, try, outcome, places = string.match(ARGV[i], '^(%d+) (%d+) (%d+) (%S+)(.*)$')
  next_of[source] = next_of[source] or number_of('next:' .. source)
  back_of[source] = back_of[source] or number_of('back:' .. source)
  local alike = {next = next_of[source], back = back_of[source], try = tonumber(try), outcome = outcome,
    counter = ' ' .. source .. ' ' .. epoch}
  for position, number, solved in string.gmatch(places, ' (%d+)/?(%d*)/?(%d?)') do
    items[#items + 1] = source .. ' ' .. position
    ends[#ends + 1] = {item = items[#items], position = tonumber(position), of = alike, number = tonumber(number),
      is_solved = solved == '1'}
  end
end
if #items == 0 then return ARGV[4] end
for i, entry in ipairs(redis.call('HMGET', keys.prompt_entries, unpack(items))) do entries[items[i]] = entry end
local base = number_of('base')

local function change(item, entry) entries[item], changed[item] = entry, true end

-- Whether the prompt is below `next` of its source.
local function is_begun(it) return it.position < it.of.next end

local function count_up(what, it, by)
  local counter = what .. it.of.counter
  counts[counter] = (counts[counter] or 0) + by
end

local function finish(it, what)
  if it.nonce == NOBODY then redis.call('ZREM', keys.prompt_again, it.item) end
  change(it.item, not is_begun(it) and 'ended')
  count_up(what, it, 1)
end

-- A prompt that is played again because it was set back may have been counted in this epoch.
local function note_result(it, is_solved)
  if it.number and not (is_solved and it.position < it.of.back) then note_solved(skip_solved, it.number, is_solved) end
end

local function give_up(it)
  finish(it, 'given_up:' .. it.of.outcome)
  note_result(it, false)
  local order = number_of('given_up') + 1
  redis.call('HSET', keys.prompt_state, 'given_up', whole(order))
  redis.call('ZADD', keys.prompt_given_up, whole(order), it.item .. ' ' .. whole(it.of.try) .. ' ' .. it.of.outcome)
  if redis.call('ZCARD', keys.prompt_given_up) > GIVEN_UP_KEPT then
    redis.call('ZREM', keys.prompt_given_up, redis.call('ZRANGE', keys.prompt_given_up, 0, 0)[1])
  end
end

local function put(item, try, failures, nonce) change(item, whole(try) .. ' ' .. whole(failures) .. ' ' .. nonce) end

-- An operator has put a dead group back: its try is in play again, unless another one is.
local function take_back(it)
  local try = it.of.try
  if it.now == try + 1 and it.nonce == NOBODY and it.failures > 0 then  -- else it was set back to a checkpoint
    redis.call('ZREM', keys.prompt_again, it.item)
    count_up('again:dead', it, -1)
    put(it.item, try, math.max(0, it.failures - 1), GONE)
  elseif not it.now and redis.call('ZREM', keys.prompt_given_up, it.item .. ' ' .. whole(try) .. ' dead') == 1 then
    put(it.item, try, retries, GONE)
    count_up('given_up:dead', it, -1)
  end
end

-- Whether an end counts, and how often the prompt had failed before. Sets try, failures and nonce of its entry.
local function tries_of(it)
  local now, failures, nonce = string.match(entries[it.item] or '', '^(%d+) (%d+) (%S+)')
  it.now, it.failures, it.nonce = tonumber(now or ''), tonumber(failures or ''), nonce
  if it.now then return it.of.try >= it.now or (IN_WEIGHTS[it.of.outcome] and it.of.try >= base), it.failures end
  return not (entries[it.item] or is_begun(it)) and it.of.try >= base, it.of.try - base
end

for _, it in ipairs(ends) do
  local counted, failures = tries_of(it)
  local outcome, try = it.of.outcome, it.of.try
  local is_fault = not NO_FAULT[outcome]
  if outcome == 'requeued' then
    take_back(it)
  elseif not counted then
    -- It has ended, or is played under a later try.
  elseif IN_WEIGHTS[outcome] or FILTERS[outcome] then
    finish(it, FILTERS[outcome] and 'filtered:' .. outcome or 'trained')
    note_result(it, it.is_solved)
  elseif failures >= retries and is_fault then
    give_up(it)
  else
    put(it.item, try + 1, failures + (is_fault and 1 or 0), NOBODY)
    redis.call('ZADD', keys.prompt_again, whole(it.position), it.item)
    note_try(try + 1)
    count_up('again:' .. outcome, it, 1)
    -- A resume from the newest checkpoint rolls back, too: what comes back then may be left as any other prompt.
    if not is_fault and number_of('branch') > 0 then redis.call('HSET', keys.prompt_state, 'is_back', '1') end
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
for counter, number in pairs(counts) do redis.pcall('HINCRBY', keys.prompt_state, counter, whole(number)) end
return ARGV[4]
