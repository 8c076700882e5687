-- Who has the tickets of an open group: nonces of calls of `begin`, in the field 'holders' of its hash; '' when nobody has
-- any more. At so many characters no more are noted, and the group is never withdrawn.
local MAX_HOLDERS = 200

local function is_withdrawn(group_key)
  local group = redis.call('HMGET', group_key, 'holders', 'slots', 'unfilled')
  return group[1] == '' and group[2] == group[3]
end
